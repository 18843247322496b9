"""Directories that appear whole or not at all, and what the parts of a checkpoint are called."""

from __future__ import annotations

import shutil
from pathlib import Path

from enginehouse.errors import UserError

PARTS = ("model", "optimizer", "rng")


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, lacks what was asked of it, is of another model, or cannot be written."""


def move_into_place(partial: Path, target: Path) -> None:
    """Rename the whole directory `partial` to `target`, replacing what that held.

    What it held lies beside it as `.<name>.replaced` in between; if the renaming fails it is put back.
    """
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def parts_of(what: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that tags mean; `("*",)` means all.

    Raises:
        CheckpointError: a tag is unknown.
    """
    unknown = sorted(set(what) - {*PARTS, "*"})
    if unknown:
        raise CheckpointError(
            f"a checkpoint has no part {unknown[0]!r}; its parts are {', '.join(PARTS)}, or '*' for all"
        )
    return PARTS if "*" in what else tuple(part for part in PARTS if part in what)
