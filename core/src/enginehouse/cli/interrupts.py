"""Signals that ask a run to end: the first one ends it in order, the second one, or too long an ending, at once."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from enginehouse.controller.interruption import SIGNALS, note_signal

if TYPE_CHECKING:
    from typing import Self

EXIT_CODE = 130
"""What a shell calls "ended by Ctrl-C"."""
GRACE_SECONDS = 8.0
"""Longest time an orderly ending may take, where nothing else is said."""
LAST_WORDS_SECONDS = 1.0
"""Longest time `before_force` may take: what it needs may be locked by the very thread that is stuck."""
ECHO_SECONDS = 1.0
"""`timeout`, and a terminal that is closed, send their signal to the program and to its group: that is one wish."""
KEY_ECHO_SECONDS = 0.2
"""The same for SIGINT, which may be a key as well: nobody presses it twice in that."""

_ENDED = 0


class Interrupts:
    """A context in which the first of `SIGNALS` raises `KeyboardInterrupt` in the main thread.

    A second one kills all child processes and this one; so do, unless the first was Ctrl-C, `grace_seconds` without an
    end of the context. That needs nothing of the main thread, which may be in native code and run no Python.

    Args:
        before_force: called before that, in a thread of its own, for at most `LAST_WORDS_SECONDS`; puts the terminal
            right and says what was saved. It may fail, or hang.
        grace_seconds: longest time an orderly ending may take after a signal other than Ctrl-C.
        last_program: names a Python module and its arguments; it is run in place of this process after that, in the
            same process, with the exit code as its first argument. None, or a name of none: the process ends.

    Attributes:
        number: the signal that came first; None before there is one.
    """

    def __init__(
        self,
        before_force: Callable[[], None],
        grace_seconds: float | None = None,
        last_program: Callable[[], Sequence[str] | None] = lambda: None,
    ):
        self.number: int | None = None
        self._before_force, self._last_program = before_force, last_program
        self._grace_seconds = GRACE_SECONDS if grace_seconds is None else grace_seconds
        self._former: dict[int, Any] = {}
        self._notice: threading.Thread | None = None
        self._raised = self._recorded = False

    @property
    def exit_code(self) -> int:
        """What a shell calls "ended by that signal"."""
        return 128 + self.number if self.number else EXIT_CODE

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            note_signal(None)
            # Python writes each signal's number here as it arrives, whatever the main thread is doing.
            self._news, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._former_fd = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._watcher.start()
            numbers = [number for number in SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]  # nohup
            self._former = {number: signal.signal(number, self._raise) for number in numbers}
        return self

    def record_end(self) -> bool:
        """Have no signal raise from now on, as the end is being recorded; say whether one came before.

        A first one still begins the grace, and a second one still ends it.
        """
        came, self._raised = self._raised, True
        self._recorded = True
        return came or self.number is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._former:
            return
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            self._told.send(bytes([_ENDED]))
        self._watcher.join(ECHO_SECONDS)
        if self._notice is not None:
            self._notice.join(ECHO_SECONDS)
        if self._recorded:
            atexit.register(_ignore_signals)  # Ray's own end may take a second, and there is nothing left to end

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, once; what a further signal means is the watcher's to say."""
        if not self._raised:
            self._raised = True
            self.number = self.number or number
            note_signal(number)
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for the end of the context; force it after a second signal, or where the first one's time is up."""
        first = self._next(None)
        if first == _ENDED:
            return
        came, self.number = time.monotonic(), self.number or first
        # In a thread: a terminal that takes no more would hold this one up.
        self._notice = threading.Thread(target=_write_notice, name="interrupt-notice", daemon=True)
        self._notice.start()
        until = None if first == signal.SIGINT else came + self._grace_seconds
        while (again := self._next(None if until is None else until - time.monotonic())) is not None:
            if again == _ENDED:
                return
            if time.monotonic() > came + (KEY_ECHO_SECONDS if again == signal.SIGINT else ECHO_SECONDS):
                break
        self._force()

    def _next(self, seconds: float | None) -> int | None:
        """The next of `SIGNALS`, or `_ENDED`; None if none comes in time."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._news.settimeout(left)
            with contextlib.suppress(TimeoutError):
                (number,) = self._news.recv(1)
                if number == _ENDED or number in SIGNALS:
                    return number

    def _force(self) -> None:
        import psutil

        last_words = threading.Thread(target=self._say_last_words, name="last-words", daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_SECONDS)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(Exception):
            if program := self._last_program():  # no thread of ours is left then, however stuck it is
                module, *arguments = program
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until that has handlers
                os.execv(sys.executable, [sys.executable, "-m", module, str(self.exit_code), *arguments])
        os._exit(self.exit_code)

    def _say_last_words(self) -> None:
        with contextlib.suppress(Exception):
            self._before_force()


def _is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _write_notice() -> None:
    # Not print: the interrupted thread may be inside a write to the same stream. The terminal may be closed.
    with contextlib.suppress(OSError):
        os.write(2, b"\nInterrupted: ending the run. Once more ends it at once.\n")


def _hear_no_news() -> None:
    """A forked child's signals are its own: it has our handlers, and would tell us."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_no_news)
