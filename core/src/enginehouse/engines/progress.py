"""What tells an engine that works from one that hangs: when it last got on with what it does.

A call of a worker may take as long as it likes while it gets on; once nothing has been noted for the time limit of a
call (`cluster.call_timeout_seconds`), it has failed. Workers note each optimizer step, each request that ends, and, as
they save, load and export, that bytes go to files and come from them. An engine that takes long between these notes
what it does meanwhile; the limit then counts from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["note_progress"]

LOOK_SECONDS = 5.0
"""How often `note_file_progress` looks."""
LEAST_BYTES = 1 << 20
"""Fewer between two looks are no progress: a process that hangs writes logs, too."""

_last = float("-inf")


def note_progress() -> None:
    """This process got on: a micro-batch was computed, a token drawn. Cheap, and from any thread."""
    global _last
    _last = time.monotonic()


@contextmanager
def note_file_progress() -> Iterator[None]:
    """Within, note progress while this process reads or writes files, whatever library does it for it."""
    over = threading.Event()
    watch = threading.Thread(target=_watch_files, args=(over, _bytes_moved()), name="progress of files", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()


def _watch_files(over: threading.Event, before: int | None) -> None:
    while before is not None and not over.wait(LOOK_SECONDS):
        now = _bytes_moved()
        if now is not None and now - before >= LEAST_BYTES:
            note_progress()
            before = now


def _bytes_moved() -> int | None:
    """Bytes that this process has read and written so far; None where the system does not say."""
    try:
        with open("/proc/self/io") as file:
            counted = dict(line.split(": ") for line in file)
    except OSError:
        return None
    return sum(int(counted.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


def idle_seconds() -> float:
    """How long ago this process got on last; infinite where it never did."""
    return time.monotonic() - _last
