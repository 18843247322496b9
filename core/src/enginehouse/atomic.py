"""Files and directories that are written completely or not at all, even across a power failure."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

_numbers = itertools.count()


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write text, or a series of texts, to the file `path` in one step. A reader never sees a partly written file.

    Characters that UTF-8 cannot encode, such as half a surrogate pair from a file name, are escaped.

    Raises:
        OSError: the file could not be written. The old file is unchanged, and no partly written file is left.
    """
    staging = _staging(path)
    try:
        with staging.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    _entries_to_disk(path.parent)


def staging_path(path: Path) -> Path:
    """Return a new path beside `path`, where a caller writes a directory before `move_into_place`. Makes the parent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _staging(path)


def move_into_place(staging: Path, path: Path, *, to_disk: bool = True) -> None:
    """Move the directory `staging` to `path`, and replace the old content of `path`.

    During the move, the old content is kept beside `path` as `.<name>.replaced`. It is put back if the move fails. If
    the process is killed during the move, `find_set_aside` finds the old content and `clear_partial` puts it back.

    Args:
        to_disk: True: fsync every file and directory in `staging` before the move.
    """
    for directory, _, files in os.walk(staging) if to_disk else ():
        for name in files:
            _to_disk(Path(directory, name))
        _entries_to_disk(Path(directory))
    replaced = _replaced(path)
    try:
        if path.exists():  # else `replaced` may be the only copy, from an earlier attempt
            _remove(replaced)
            os.rename(path, replaced)
        os.rename(staging, path)
    except BaseException:  # an interrupt may come after a renaming as well
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        raise
    _entries_to_disk(path.parent)
    _remove(replaced)


def find_set_aside(path: Path) -> Path | None:
    """Return the old content of `path`, if `path` is missing because a process was killed in `move_into_place`."""
    replaced = _replaced(path)
    return replaced if replaced.is_dir() and not path.exists() else None


def clear_partial(directory: Path) -> None:
    """Put back all content in `directory` that a killed `move_into_place` set aside, and delete partly written content.
    It never fails, and leaves whatever it cannot move or delete. No other process may write in `directory`."""
    for remains in directory.glob(".*"):
        place = remains.with_name(remains.name.removeprefix(".").removesuffix(".replaced"))
        if find_set_aside(place) != remains:
            shutil.rmtree(remains, ignore_errors=True)
            continue
        try:
            os.rename(remains, place)
        except OSError as error:
            log.warning("cannot restore the old content of %s from %s: %s", place, remains, error)


def point_to(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target`, and replace an existing link in one step. Raises `OSError` if
    the file system has no symbolic links."""
    staging = _staging(link)
    staging.symlink_to(os.path.relpath(target, link.parent))
    os.replace(staging, link)


def _staging(path: Path) -> Path:
    """Return a name beside `path` that no other writer uses, neither in this process nor in another."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}-{next(_numbers)}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _entries_to_disk(directory: Path) -> None:
    """Fsync a directory, so that new and renamed entries survive a power failure. Do nothing if its file system does
    not support that."""
    try:
        _to_disk(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
