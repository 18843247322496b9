"""Finds the files of a split of a data set on the hub.

`datasets` derives the files of each split from the names of the files and from the data set's card. The rows are then
read as from local files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import DataError, first_line, listed, nearest
from enginehouse_rl.data.files import SUFFIXES
from enginehouse_rl.hub.names import HubName
from enginehouse_rl.hub.snapshots import Say, Snapshot, escape_patterns, fetch, list_files

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files that assign data files to splits."""


class HubSplit(NamedTuple):
    """The files of a split.

    Attributes:
        name: the complete name, with a revision only if the config names one.
    """

    name: HubName
    snapshot: Snapshot
    files: tuple[str, ...]


def fetch_split(name: HubName, key: str, usual: str | None, say: Say) -> HubSplit:
    """Fetch the files of a split.

    Args:
        key: the config key that has the name, for messages.
        usual: the split to take if the name has none and the data set has several.

    Raises:
        DataError: the files cannot be fetched, do not exist, or have an unknown format.
    """
    card = fetch(name, key, CARDS, say=say)
    say(f"Looking for the split of {name}")
    try:
        listing = list_files(name, card.commit)
    except Exception as error:
        raise DataError(f"{key}: the files of {name} cannot be listed: {first_line(error)}") from error
    with tempfile.TemporaryDirectory() as folder:
        sketch = Path(folder, name.repository.partition("/")[2])
        _sketch(sketch, listing, card.path)
        config, splits = _read_splits(sketch, name, key)
    split = _choose_split(name, key, usual, config, splits)
    full = name._replace(config=config, split=split)
    files = splits[split]
    if strange := [file for file in files if not file.lower().endswith(SUFFIXES)]:
        raise DataError(
            f"{key}: {full} is stored as {listed(strange, 2)}, but rows can only be read from {', '.join(SUFFIXES)}: "
            f"write such a file with `datasets`, load_dataset({name.repository!r}, {config!r}, "
            f"split={split!r}).to_parquet('rows.parquet'), and name this file"
        )
    fetch(name._replace(revision=card.commit), key, escape_patterns(files), say=say, unreached=card.unreached)
    return HubSplit(full, card, tuple(str(card.path / file) for file in files))


def _sketch(folder: Path, files: Sequence[str], cards: Path) -> None:
    """Create a folder with the names of a data set's files. All files are empty except the cards."""
    for file in files:
        path = folder / file
        if path.suffix == ".py" or not path.resolve().is_relative_to(folder.resolve()):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if file in CARDS and (cards / file).is_file():
            shutil.copyfile(cards / file, path)
        else:
            path.touch()


def _read_splits(sketch: Path, name: HubName, key: str) -> tuple[str, Mapping[str, list[str]]]:
    """Return the configuration of a name, and the files of its splits.

    Raises:
        DataError: the configuration does not exist, or `datasets` finds no data files.
    """
    import datasets
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        configs = datasets.get_dataset_config_names(str(sketch))
        config = name.config or datasets.get_dataset_default_config_name(str(sketch))
        if config is None or config not in configs:
            raise DataError(f"{key}: {name}: {_describe_config_error(name, configs)}")
        builder = datasets.load_dataset_builder(str(sketch), config, cache_dir=str(sketch.parent / "cache"))
    except DataError:
        raise
    except Exception as error:  # of many kinds
        raise DataError(f"{key}: `datasets` finds no data files in {name}: {first_line(error)}") from error
    finally:
        if not quiet:
            enable_progress_bars()
    files: Any = builder.config.data_files
    root = sketch.resolve()
    return config, {
        str(split): [Path(file).relative_to(root).as_posix() for file in paths] for split, paths in files.items()
    }


def _describe_config_error(name: HubName, configs: Sequence[str]) -> str:
    if name.config is None:
        example = name._replace(config=name.split if name.split in configs else configs[0], split="train")
        return f"it has several configurations, {listed(configs)}; name one of them, such as {example}"
    return f"it has no configuration {name.config!r}. {nearest(name.config, configs)}"


def _choose_split(name: HubName, key: str, usual: str | None, config: str, splits: Mapping[str, Sequence[str]]) -> str:
    """Return the split of a name: the split in the name, the only split, or the usual split.

    Raises:
        DataError: the split does not exist, or the name is ambiguous.
    """
    split = name.split or (next(iter(splits)) if len(splits) == 1 else usual)
    names = [str(name._replace(config=config, split=choice)) for choice in splits]
    if split is None:
        raise DataError(f"{key}: {name} has several splits; name one of them: {', '.join(names)}")
    if split not in splits:
        raise DataError(f"{key}: {name} has no split {split!r}. {nearest(split, splits)}. Write for example {names[0]}")
    return split
