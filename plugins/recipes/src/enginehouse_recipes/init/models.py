"""The model of a first run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from enginehouse.errors import UserError

TINY = "tiny"
"""The model that is made where there is none at hand."""


class Model(NamedTuple):
    """The model that is trained.

    Attributes:
        path: as the config names it; empty: the tiny one.
        chats: whether it has a chat template.
        positions: tokens it can read; None: that is not known.
    """

    path: str = ""
    chats: bool = True
    positions: int | None = None


def read_model(answer: str, directory: Path) -> Model:
    """The model of an answer: `"tiny"`, a directory, or a name of the hub that is in the local cache.

    Raises:
        ModelError: it is none, with the cure.
    """
    from enginehouse.engines.model import positions
    from enginehouse_rl.config import paths

    if answer.strip().lower() == TINY:
        return Model()
    path = Path(answer).expanduser()
    if not path.exists() and (cached := _cached(answer)) is not None:
        path = cached
    try:
        config = paths.read_model(str(path), "model")
    except UserError as error:
        error.args = (f"{error}. Or take the model {TINY!r}, which is made here and needs no download",)
        raise
    return Model(seen_from(path, directory), paths.has_chat_template(str(path)), positions(config))


def _cached(name: str) -> Path | None:
    """Where a model of the hub lies in the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def seen_from(path: Path, directory: Path) -> str:
    """A path as a config in `directory` names it: relative where it lies inside."""
    absolute = path.absolute()
    return str(absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute)
