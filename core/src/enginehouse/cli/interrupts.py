"""Signals that end a run. The first signal ends the run in an orderly way; a second one or a timeout kills it."""

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
"""Exit code that a shell reports for a program ended by Ctrl-C."""
GRACE_SECONDS = 8.0
"""Default time limit in seconds for an orderly end of the run."""
LAST_WORDS_SECONDS = 1.0
"""Time limit in seconds for `before_force`, which may wait for a lock that the stuck main thread holds."""
ECHO_SECONDS = 1.0
"""Time in seconds after the first signal within which a further signal is ignored. `timeout` and a closed terminal send
a signal twice."""
KEY_ECHO_SECONDS = 0.2
"""The same time for a further SIGINT, which may come from Ctrl-C. Nobody presses Ctrl-C twice within this time."""

_ENDED = 0


class Interrupts:
    """A context in which the first of `SIGNALS` raises `KeyboardInterrupt` in the main thread.

    A second signal kills this process and all its children. They are also killed if the context does not end within
    `grace_seconds` of the first signal, unless that signal was Ctrl-C. The kill works even while the main thread runs
    native code.

    Args:
        before_force: called before the kill in a separate thread, for at most `LAST_WORDS_SECONDS`. It resets the
            terminal and reports what was saved. If it fails or hangs, the process is killed nevertheless.
        grace_seconds: time limit for an orderly end after a signal other than Ctrl-C; None: `GRACE_SECONDS`.
        last_program: function that returns a Python module and its arguments, or None. The module is run as a program,
            which replaces this process after the kill and gets the exit code as its first argument. If the function
            returns None, the process exits.

    Attributes:
        number: number of the first signal; None before the first signal.
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
        self._has_raised = self._recorded = False

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for a program ended by signal `number`."""
        return 128 + self.number if self.number else EXIT_CODE

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            note_signal(None)
            # Python writes each signal's number to this socket as the signal arrives, whatever the main thread does.
            self._arrivals, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            self._former_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="interrupts", daemon=True)
            self._watcher.start()
            numbers = [number for number in SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]  # nohup
            self._former = {number: signal.signal(number, self._raise) for number in numbers}
        return self

    def record_end(self) -> bool:
        """Stop signals from raising, because the caller now records the end of the run. Return True if a signal came
        before this call.

        A first signal still starts the grace period, and a second signal still kills the process.
        """
        has_raised, self._has_raised = self._has_raised, True
        self._recorded = True
        return has_raised or self.number is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._former:
            return
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            self._wakeup.send(bytes([_ENDED]))
        self._watcher.join(ECHO_SECONDS)
        if self._notice is not None:
            self._notice.join(ECHO_SECONDS)
        if self._recorded:
            atexit.register(_ignore_signals)  # Ray's shutdown may take a second

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, once. The thread `_watch` handles later signals."""
        if not self._has_raised:
            self._has_raised = True
            self.number = self.number or number
            note_signal(number)
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Wait for the end of the context, and kill the process after a second signal or the grace period."""
        first = self._next(None)
        if first == _ENDED:
            return
        arrival, self.number = time.monotonic(), self.number or first
        # A separate thread, because a blocked terminal would block this thread.
        self._notice = threading.Thread(target=_write_notice, name="interrupt-notice", daemon=True)
        self._notice.start()
        until = None if first == signal.SIGINT else arrival + self._grace_seconds
        while (number := self._next(None if until is None else until - time.monotonic())) is not None:
            if number == _ENDED:
                return
            if time.monotonic() > arrival + (KEY_ECHO_SECONDS if number == signal.SIGINT else ECHO_SECONDS):
                break
        self._force()

    def _next(self, seconds: float | None) -> int | None:
        """Return the number of the next signal in `SIGNALS`, or `_ENDED` at the end of the context. Return None if
        no signal comes within `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            timeout = None if until is None else until - time.monotonic()
            if timeout is not None and timeout <= 0:
                return None
            self._arrivals.settimeout(timeout)
            with contextlib.suppress(TimeoutError):
                (number,) = self._arrivals.recv(1)
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
            if program := self._last_program():  # exec also ends stuck threads
                module, *arguments = program
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the program has handlers
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
    # Not print, because the interrupted thread may be inside a write to the same stream. The terminal may be closed.
    with contextlib.suppress(OSError):
        os.write(2, b"\nInterrupted: ending the run. Interrupt again to end it at once.\n")


def _drop_wakeup() -> None:
    """Stop a forked child from writing its signals to this process's socket, which it inherits with the handlers."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_drop_wakeup)
