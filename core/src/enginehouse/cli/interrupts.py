"""Ctrl-C: the first one ends a run in order, the second one, or too long an ending, ends it at once."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

EXIT_CODE = 130
"""What a shell calls "ended by Ctrl-C"."""
GRACE_SECONDS = 8.0
"""Longest time an orderly ending may take."""
LAST_WORDS_SECONDS = 1.0
"""Longest time `before_force` may take: what it needs may be locked by the very thread that is stuck."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which the first SIGINT or SIGTERM raises `KeyboardInterrupt` in the main thread.

    A second one, or `GRACE_SECONDS` without an end of the context, kills all child processes and this one.

    Args:
        before_force: called before that, in a thread of its own, for at most `LAST_WORDS_SECONDS`; puts the terminal
            right and says what was saved. It may fail, or hang.
    """

    def __init__(self, before_force: Callable[[], None]):
        self._before_force = before_force
        self._former: dict[int, Any] = {}
        # The one queue a signal handler may put to: it interrupts its thread anywhere, also inside a `put`.
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
            self._former = {number: signal.signal(number, self._first) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._news.put("ended")
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _first(self, number: int, frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, lambda number, frame: self._news.put("signal"))
        self._news.put("signal")
        # Not print: the interrupted thread may be inside a write to the same stream.
        os.write(2, b"\nInterrupted: ending the run. Once more ends it at once.\n")
        raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for the end of the context; force it after a second signal, or the grace after the first."""
        if self._news.get() == "ended":
            return
        with contextlib.suppress(queue.Empty):
            if self._news.get(timeout=GRACE_SECONDS) == "ended":
                return
        self._force()

    def _force(self) -> None:
        import psutil

        last_words = threading.Thread(target=self._say_last_words, name="last-words", daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_SECONDS)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(EXIT_CODE)

    def _say_last_words(self) -> None:
        with contextlib.suppress(Exception):
            self._before_force()
