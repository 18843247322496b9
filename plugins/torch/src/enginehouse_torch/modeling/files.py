"""What the parts of a checkpoint are called, and the error of one that cannot be used."""

from __future__ import annotations

from enginehouse.errors import UserError

PARTS = ("model", "optimizer", "rng")


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, lacks what was asked of it, is of another model, or cannot be written."""


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
