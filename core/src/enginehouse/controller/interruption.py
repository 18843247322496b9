"""Signals that ask the program to end, and a context that defers their `KeyboardInterrupt`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a program to end, sent by Ctrl-C, by a scheduler or `kill`, or by a closed terminal."""

abandoned: list[str] = []
"""Names of objects that hung as they were ended, such as a tracker; the program ends without waiting for them."""

_came: int | None = None


def note_signal(number: int | None) -> None:
    """Note which of `SIGNALS` the next `KeyboardInterrupt` is raised for; None: unknown.

    The exception cannot carry it, because Ray raises another one in its place while it waits.
    """
    global _came
    _came = number


def seconds_to_end(grace_seconds: float) -> float | None:
    """Return the seconds that an orderly ending may take after a `KeyboardInterrupt`.

    A sender of signals kills in the end, after `grace_seconds`. After Ctrl-C there is no limit (None), because the user
    may press it once more.
    """
    return None if _came in (None, signal.SIGINT) else grace_seconds


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Call handlers of `SIGNALS` as ever, but raise their `KeyboardInterrupt` when the context ends.

    Only the first is deferred; a second is raised at once. Outside the main thread this does nothing.
    """
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
            if signal.getsignal(number) is handler:  # else someone else has taken the signal over meanwhile
                signal.signal(number, former[number])
        if waiting:
            raise waiting[0]
