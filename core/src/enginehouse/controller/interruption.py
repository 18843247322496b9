"""Ctrl-C at a moment when it must not come: put off until that moment is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Those that ask a program to end: Ctrl-C, a scheduler or `kill`, a terminal that was closed."""

abandoned: list[str] = []
"""Names of what hung as it was ended, a tracker, say: the program ends without waiting for it."""

_came: int | None = None


def note_signal(number: int | None) -> None:
    """Note which of `SIGNALS` the next `KeyboardInterrupt` is raised for; None: nobody said.

    The exception does not say it: Ray raises another in place of one that comes while it waits.
    """
    global _came
    _came = number


def seconds_to_end(grace_seconds: float) -> float | None:
    """Return how long an orderly ending may take after a `KeyboardInterrupt`.

    It is `grace_seconds`, because what sends a signal kills in the end; and None, as long as it takes, after Ctrl-C,
    because whoever pressed it may press it once more.
    """
    return None if _came in (None, signal.SIGINT) else grace_seconds


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Call handlers of `SIGNALS` as ever, but raise their `KeyboardInterrupt` when the context ends.

    Only the first is put off; a second one is raised at once. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[KeyboardInterrupt] = []

    def putting_off(former: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                former(number, frame)
            except KeyboardInterrupt as interrupt:
                if waiting:
                    raise
                waiting.append(interrupt)

        return handle

    former = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    ours = {number: putting_off(handler) for number, handler in former.items()}
    for number, handler in ours.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in ours.items():
            if signal.getsignal(number) is handler:  # else someone else has taken the signal over meanwhile
                signal.signal(number, former[number])
        if waiting:
            raise waiting[0]
