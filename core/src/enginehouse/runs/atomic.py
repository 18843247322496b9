"""Files and directories that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file `path` by `text` in one step: a reader sees the old file or the new one."""
    staging = path.with_name(f".{path.name}.partial")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def staging_path(path: Path) -> Path:
    """Where to write what shall become the directory `path`: beside it, so that moving it is one step.

    Its parent exists and it does not: what an earlier attempt left there is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.partial")
    _remove(staging)
    return staging


def move_into_place(staging: Path, path: Path) -> None:
    """Make the directory `staging` be `path`, in place of what was there."""
    former = path.with_name(f".{path.name}.former")
    _remove(former)
    if path.exists():
        os.rename(path, former)
    os.rename(staging, path)
    _remove(former)


def point_to(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, replacing a former one in one step.

    Raises:
        OSError: the file system has no symbolic links.
    """
    staging = link.with_name(f".{link.name}.partial")
    staging.unlink(missing_ok=True)
    staging.symlink_to(os.path.relpath(target, link.parent))
    os.replace(staging, link)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
