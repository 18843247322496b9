"""Directories that appear whole or not at all, and what the parts of a checkpoint are called."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from enginehouse.errors import UserError

PARTS = ("model", "optimizer", "rng")


class CheckpointError(UserError):
    """A checkpoint that is missing, lacks what was asked of it, or belongs to another model."""


@contextlib.contextmanager
def whole_directory(path: str | Path) -> Iterator[Path]:
    """Give a directory to write into that becomes `path` once the block is left without an exception.

    What `path` held before is replaced as a whole; an exception leaves it as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    partial, replaced = (path.with_name(f".{path.name}.{kind}-{token}") for kind in ("partial", "replaced"))
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)
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
