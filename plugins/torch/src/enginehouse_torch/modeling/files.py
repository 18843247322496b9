"""Names of the parts of a checkpoint, and the error of a checkpoint that cannot be used."""

from __future__ import annotations

from pathlib import Path

from enginehouse.atomic import find_set_aside
from enginehouse.errors import UserError

__all__ = ["CheckpointError", "parts_of"]

PARTS = ("model", "optimizer", "rng")


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, incomplete, of another model, or cannot be written."""


def parts_of(what: tuple[str, ...]) -> tuple[str, ...]:
    """Return the parts that tags name; `("*",)` means all.

    Raises:
        CheckpointError: a tag is unknown.
    """
    unknown = sorted(set(what) - {*PARTS, "*"})
    if unknown:
        raise CheckpointError(
            f"a checkpoint has no part {unknown[0]!r}; its parts are {', '.join(PARTS)}, or '*' for all"
        )
    return PARTS if "*" in what else tuple(part for part in PARTS if part in what)


def describe_alternative(directory: Path) -> str:
    """Describe what a directory holds in place of a checkpoint, as the end of an error message; empty if nothing."""
    if (directory / "config.json").is_file():
        return ": it is a Hugging Face model; use it as the path of the engine's model"
    if (before := find_set_aside(directory)) is not None:
        # Loading does not rename it back, because the process that replaces it may be alive, between its two renames.
        return f"; a save was killed while it replaced the checkpoint: rename {str(before)!r}, which is the earlier one"
    return ""
