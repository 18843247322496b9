"""Ctrl-C: the first one ends a run in order, the second one, or too long an ending, ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

EXIT_CODE = 130
"""What a shell calls "ended by Ctrl-C"."""
GRACE_SECONDS = 9.0
"""Longest time an orderly ending may take."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which the first SIGINT or SIGTERM raises `KeyboardInterrupt` in the main thread.

    A second one, or `GRACE_SECONDS` without an end of the context, kills all child processes and this one.

    Args:
        before_force: called before that; puts the terminal right and says what was saved. It may fail.
    """

    def __init__(self, before_force: Callable[[], None]):
        self._before_force = before_force
        self._former: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._first) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, lambda number, frame: self._force())
        self._timer = threading.Timer(GRACE_SECONDS, self._force)
        self._timer.daemon = True
        self._timer.start()
        # Not print: the interrupted thread may be inside a write to the same stream.
        os.write(2, b"\nInterrupted: ending the run. Once more ends it at once.\n")
        raise KeyboardInterrupt

    def _force(self) -> None:
        import psutil

        with contextlib.suppress(Exception):
            self._before_force()
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(EXIT_CODE)
