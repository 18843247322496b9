"""Signals that ask the program to end, and a context that defers the `KeyboardInterrupt` of a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end. Ctrl-C, a scheduler, `kill` or a closed terminal sends them."""

abandoned: list[str] = []
"""Names of objects, such as a tracker, that hung when they were closed. The program ends without waiting for them."""

_came: int | None = None


def note_signal(number: int | None) -> None:
    """Store the signal of the next `KeyboardInterrupt`; None if it is unknown. The exception cannot carry the signal,
    because Ray replaces the exception while it waits."""
    global _came
    _came = number


def seconds_to_end(grace_seconds: float) -> float | None:
    """Return the seconds that an orderly end may take after a `KeyboardInterrupt`; None if there is no limit.

    There is no limit after Ctrl-C, because the user may press it again. The sender of another signal is expected to
    kill the process after `grace_seconds`.
    """
    return None if _came in (None, signal.SIGINT) else grace_seconds


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Call the handlers of `SIGNALS`, but raise the first `KeyboardInterrupt` of a handler only when the context ends.
    A second `KeyboardInterrupt` is raised at once. Outside the main thread the context does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[KeyboardInterrupt] = []

    def defer(former: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                former(number, frame)
            except KeyboardInterrupt as interrupt:
                if waiting:
                    raise
                waiting.append(interrupt)

        return handle

    former = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    deferred = {number: defer(handler) for number, handler in former.items()}
    for number, handler in deferred.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in deferred.items():
            if signal.getsignal(number) is handler:  # else other code has set a handler since
                signal.signal(number, former[number])
        if waiting:
            raise waiting[0]
