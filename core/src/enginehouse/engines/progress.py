"""Notes of progress, which distinguish a working engine from a hanging engine.

A call of a worker may take any time while it makes progress. It fails once no progress was noted for
`cluster.call_timeout_seconds`. Workers note each optimizer step, each finished request and, while they save, load and
export, file traffic. An engine with longer operations notes its own progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["note_progress"]

LOOK_SECONDS = 5.0
"""Interval at which `note_file_progress` checks."""
LEAST_BYTES = 1 << 20
"""Smallest number of bytes between two checks that counts as progress. Fewer bytes may be log lines, which a hanging
process still writes."""

_last = float("-inf")


def note_progress() -> None:
    """Note that this process made progress, such as a micro-batch or a token. Cheap, and callable from any thread."""
    global _last
    _last = time.monotonic()


@contextmanager
def note_file_progress() -> Iterator[None]:
    """Note progress inside the block while this process reads or writes files, by any library."""
    finished = threading.Event()
    arguments = (finished, _bytes_moved())
    threading.Thread(target=_watch_files, args=arguments, name="progress of files", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def _watch_files(finished: threading.Event, before: int | None) -> None:
    while before is not None and not finished.wait(LOOK_SECONDS):
        now = _bytes_moved()
        if now is not None and now - before >= LEAST_BYTES:
            note_progress()
            before = now


def _bytes_moved() -> int | None:
    """Return the bytes that this process has read and written so far; None if the system does not report them."""
    try:
        with open("/proc/self/io") as file:
            counted = dict(line.split(": ") for line in file)
    except OSError:
        return None
    return sum(int(counted.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))


def idle_seconds() -> float:
    """Return the seconds since this process last made progress; infinite if it never did."""
    return time.monotonic() - _last
