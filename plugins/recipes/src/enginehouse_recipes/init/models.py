from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from enginehouse.errors import UserError

TINY = "tiny"
"""The answer for a model that is created here."""


class ChosenModel(NamedTuple):
    """The model of a first run."""

    path: str = ""  # in the config, a name on the hub included; empty: the tiny model
    chats: bool = True  # it has a chat template
    positions: int | None = None  # maximum number of tokens of a text, if known


def read_model(answer: str, directory: Path) -> ChosenModel:
    """Read an answer: `"tiny"`, a directory, a GGUF file, or a name on the hub, whose model is then fetched.

    Raises:
        ModelError: it is none of these, or cannot be fetched.
    """
    from enginehouse.engines.model import positions
    from enginehouse.plugin.findings import Findings
    from enginehouse_rl.config import paths
    from enginehouse_rl.hub.gguf import find_gguf, make_model
    from enginehouse_rl.hub.names import HubName
    from enginehouse_rl.hub.snapshots import fetch_model

    if answer.strip().lower() == TINY:
        return ChosenModel()
    path, key, say = Path(answer).expanduser(), "model", Findings().doing
    try:
        if name := HubName.parse(answer, "model"):
            path = fetch_model(name, key, say).model_path
        file = find_gguf(str(path), key)
        place = str(make_model(file, key, say).directory if file else path)
        config = paths.read_model(place, key)
    except UserError as error:
        problem = str(error).removeprefix(f"{key}: ")  # the caller names the option
        error.args = (f"{problem}. Or take the model {TINY!r}, which is made here and needs no download",)
        raise
    finally:
        say("")
    written = answer if name else config_path(path, directory)
    return ChosenModel(written, paths.has_chat_template(place), positions(config))


def config_path(path: Path, directory: Path) -> str:
    """Return a path for a config in `directory`: relative if it is inside the directory."""
    absolute = path.absolute()
    return str(absolute.relative_to(directory) if absolute.is_relative_to(directory) else absolute)
