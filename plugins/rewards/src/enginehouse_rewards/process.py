"""A process of the reward pool, as the run sees it: rows go in, answers come out, nothing waits without a limit.

It has a line of its own to the run, so that it can die, stop or hang at any moment without touching another, and what
it was busy with is known. What it starts has its mark in the environment and ends with it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from enginehouse_rewards.program import (
    AT_WORK,
    HEAD,
    MARK,
    TIMEOUT,
    Answers,
    Failure,
    Rows,
    SetUp,
    Style,
    end_marked,
    framed,
    tail,
)

START_SECONDS = 300.0
"""Longest time a process may take to import the function."""

GRACE_SECONDS = 2.0
"""Rows of an `async` reward have their deadline in the process; it gets this much more before it is ended."""

OUTPUT_LIMIT = 2**20
"""A row's output is thrown away when it gets longer than this, in bytes; what comes then counts anew."""

PROGRAM = "import sys; sys.path[:] = {path!r}; from enginehouse_rewards.program import main; main({line}, {at_work})"


class RewardProcess:
    """Starts a process; it is ready once it says so.

    Args:
        setup: what it is told first.
        mark: of this process alone; begins with the pool's.

    Attributes:
        style: how it calls the function; None until it is ready.
        outstanding: numbers of the rows it has, and when each was handed over; in that order.
        seconds_per_answer: what the rows took that it answered last.
    """

    def __init__(self, setup: SetUp, mark: str):
        self.mark = mark
        self.style: Style | None = None
        self.outstanding: dict[int, float] = {}
        self.seconds_per_answer = 0.0
        self._timeout, self._concurrency = setup.timeout_seconds, setup.concurrency
        self._late = 0  # rows, each of which may have left a thread behind
        self._since = time.monotonic()
        self._incoming, self._outgoing = bytearray(), bytearray(framed(setup))
        self.line, theirs = socket.socketpair()
        self.line.setblocking(False)
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `close` does
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # so that it can be cut while it is written to
        with theirs, tempfile.TemporaryFile(buffering=0) as at_work:
            at_work.write(AT_WORK.pack(-1))
            self._begun = mmap.mmap(at_work.fileno(), AT_WORK.size)
            descriptors = theirs.fileno(), at_work.fileno()
            program = PROGRAM.format(path=sys.path, line=descriptors[0], at_work=descriptors[1])
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=descriptors,
                env={"OMP_NUM_THREADS": "1", **os.environ, MARK: mark, TIMEOUT: str(setup.timeout_seconds)},
                start_new_session=True,  # a Ctrl-C is for the run to answer
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it is there; of a process ended by a signal, minus its number."""
        return self._process.poll()

    @property
    def begun(self) -> int:
        """Of rows that are scored one after another, the number of the one begun last, ended or not; -1: none was."""
        number: int = AT_WORK.unpack_from(self._begun)[0]
        return number

    @property
    def sending(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outgoing)

    @property
    def spent(self) -> bool:
        """Whether what late rows left running may soon hold up others."""
        return 4 * self._late >= self._concurrency

    @property
    def deadline(self) -> float | None:
        """When the process will be late, by `time.monotonic()`; None while nothing is asked of it."""
        if self.style is None:
            return self._since + START_SECONDS
        if not self.outstanding:
            return None
        if self.style == "async":
            return min(self.outstanding.values()) + self._timeout + GRACE_SECONDS
        return self._since + self._timeout

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal."""
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def hand_over(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Ask for the scores of rows, by their numbers."""
        message = framed(Rows(list(rows), list(rows.values())))
        now = time.monotonic()
        if not self.outstanding:
            self._since = now
        self.outstanding |= dict.fromkeys(rows, now)
        self._outgoing += message
        self.send()

    def send(self) -> None:
        """Send of what waits as much as fits."""
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self.line.send(self._outgoing)]

    def receive(self) -> list[Any] | None:
        """What it has said since; None if it will say no more."""
        closed = False
        try:
            while chunk := self.line.recv(2**16):
                self._incoming += chunk
            closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            closed = True
        messages = []
        while len(self._incoming) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._incoming)[0]
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(self._incoming[HEAD.size : end]))
            del self._incoming[:end]
        results = [one for message in messages if isinstance(message, Answers) for one in message.results.values()]
        self._late += sum(isinstance(one, Failure) and one.late for one in results)
        if messages:
            now = time.monotonic()
            self.seconds_per_answer, self._since = (now - self._since) / max(len(results), 1), now
        return None if closed and not messages else messages

    def output(self) -> str:
        """The end of what was printed since the row at work began."""
        return tail(self._output.fileno())

    def bound_output(self) -> None:
        """Throw output away that is longer than anybody reads."""
        if os.fstat(self._output.fileno()).st_size > OUTPUT_LIMIT:
            os.ftruncate(self._output.fileno(), 0)

    def end(self) -> None:
        """End it and all it started, at once."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self.close()
        end_marked(self.mark)

    def ask_to_end(self) -> None:
        """Say that nothing more will come: it then ends by itself, if its function lets it."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)

    def wait(self, until: float) -> None:
        """Wait for its end; kill it at `until`, by `time.monotonic()`."""
        try:
            self._process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)

    def close(self) -> None:
        """Close what was held open for it."""
        self.line.close()
        self._output.close()
        self._begun.close()
