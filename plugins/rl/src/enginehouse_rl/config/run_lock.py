"""Locks a run directory: the process that writes to it holds a lock on a file in it, as long as the process lives.

The kernel releases the lock (`flock`) when the process ends, in whatever way, so a killed run does not block the next.
Programs that the process starts do not inherit the lock, and a forked copy of the process closes the lock file at once.
Therefore only the original process holds the lock. On a file system without locks, the process named in `run.json` is
looked up instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginehouse.errors import ConfigError
from enginehouse.jsontext import decode_json
from enginehouse_rl.config.earlier_run import read_record

LOCK_FILE = "run.lock"
"""The file that is locked. It stays when a run ends, and when the directory is emptied for another run."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
"""The error numbers of a file system without locks."""
_TRIES, _PAUSE_SECONDS = 20, 0.05
"""A lock is tried for a second, because a `plan` that checks the directory holds the lock for a moment."""

_held: dict[tuple[int, int], int] = {}
"""Descriptors of this process's locks, by device and inode."""


def take(directory: Path) -> None:
    """Lock a run directory until `release` or the end of this process, unless this process holds the lock already.

    Raises:
        ConfigError: another process holds it.
    """
    path = directory / LOCK_FILE
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if (inode := _identify(os.fstat(descriptor))) in _held:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                if process := _find_by_record(directory):
                    raise _make_refusal(directory, process) from None
                return
            if not isinstance(error, BlockingIOError):
                raise
            time.sleep(_PAUSE_SECONDS)
            continue
        if not path.exists() or _identify(path.stat()) != inode:  # the locked file was deleted
            os.close(descriptor)
            continue
        _held[inode] = descriptor
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
        return
    raise _make_refusal(directory, find_holder(directory) or "another process")


def release(directory: Path) -> None:
    """Release this process's lock on a run directory, if it holds one."""
    path = directory / LOCK_FILE
    descriptor = _held.pop(_identify(path.stat()), None) if path.exists() else None
    if descriptor is not None:
        os.close(descriptor)


def check_free(directory: Path) -> None:
    """Check that no other process uses a run directory, without writing to it.

    Raises:
        ConfigError: another process uses it.
    """
    if process := find_holder(directory):
        raise _make_refusal(directory, process)


def find_holder(directory: Path) -> str | None:
    """Describe the other process that uses a run directory; None if none is known."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # missing, written by an older enginehouse, or unreadable
        return _find_by_record(directory)
    try:
        if _identify(os.fstat(descriptor)) in _held:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock
    except BlockingIOError:
        return _describe_owner(os.pread(descriptor, 4096, 0))
    except OSError:
        return _find_by_record(directory)
    finally:
        os.close(descriptor)
    return None


def _describe_owner(content: bytes) -> str:
    try:
        owner = decode_json(content)
        return f"process {int(owner['pid'])} on {owner['host']}, since {owner['since']}"
    except (ValueError, TypeError, KeyError):  # it is just being written
        return "another process"


def _find_by_record(directory: Path) -> str | None:
    """Describe the process in the run's record, if it is on this machine and still alive."""
    import psutil

    record: Mapping[str, Any] = read_record(directory)
    pid, host = record.get("pid"), record.get("host")
    if record.get("status") != "running" or host != socket.gethostname() or not isinstance(pid, int):
        return None
    try:
        began = datetime.fromisoformat(str(record.get("started"))).timestamp()
        process = psutil.Process(pid)
        is_running = process.create_time() <= began + 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return None
    return f"process {pid} on {host}" if is_running and pid != os.getpid() else None


def _make_refusal(directory: Path, process: str) -> ConfigError:
    return ConfigError(
        f"run.directory: the run in {directory} is still running ({process}): end it first, or name another "
        "directory (run.directory=...)"
    )


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _close_locks() -> None:
    """Close the lock files in a forked copy of this process. The original process keeps its locks."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_locks)
