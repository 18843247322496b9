"""The model of a first run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from enginehouse.errors import UserError

TINY = "tiny"
"""Answer for a model that is made here."""


class ChosenModel(NamedTuple):
    """The model to train."""

    path: str = ""  # in the config; empty: the tiny model
    chats: bool = True  # it has a chat template
    positions: int | None = None  # most tokens of a text, if known


def read_model(answer: str, directory: Path) -> ChosenModel:
    """Read an answer: `"tiny"`, a directory, or a hub name in the local cache.

    Raises:
        ModelError: it is none of these.
    """
    from enginehouse.engines.model import positions
    from enginehouse_rl.config import paths

    if answer.strip().lower() == TINY:
        return ChosenModel()
    path = Path(answer).expanduser()
    if not path.exists() and (cached := _find_cached(answer)) is not None:
        path = cached
    try:
        config = paths.read_model(str(path), "model")
    except UserError as error:
        error.args = (f"{error}. Or take the model {TINY!r}, which is made here and needs no download",)
        raise
    return ChosenModel(config_path(path, directory), paths.has_chat_template(str(path)), positions(config))


def _find_cached(name: str) -> Path | None:
    """Return the directory of a hub model in the local cache, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def config_path(path: Path, directory: Path) -> str:
    """Return a path for a config in `directory`: relative if it lies inside."""
    absolute = path.absolute()
    return str(absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute)
