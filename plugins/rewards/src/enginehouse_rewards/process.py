"""A process of the reward pool, as the run sees it. Rows go in, results come out, and every wait has a limit.

Each process has its own socket to the run. It can die, stop or hang without affecting another process, and the run
knows which rows it had. Programs that the process starts inherit its mark in their environment. By this mark they are
found, and killed together with the process.
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
    Failure,
    RowResults,
    RowsToScore,
    SetUp,
    Style,
    frame,
    kill_marked,
    read_tail,
)

START_SECONDS = 300.0
"""Time limit for a process to import the function."""

GRACE_SECONDS = 2.0
"""Extra time before a process of an `async` reward is killed; such a process enforces the time limit of rows itself."""

OUTPUT_LIMIT = 2**20
"""Maximum number of bytes of a row's output. Longer output is discarded, and counting starts again."""

PROGRAM = "import sys; sys.path[:] = {path!r}; from enginehouse_rewards.program import main; main({line}, {at_work})"


class RewardProcess:
    """Starts a process, which is ready once `style` is set. Its unique `mark` begins with the pool's mark."""

    def __init__(self, setup: SetUp, mark: str):
        self.mark = mark
        self.style: Style | None = None  # None until it is ready
        self.outstanding: dict[int, float] = {}  # times at which rows were handed over, by number and in order
        self.seconds_per_answer = 0.0  # mean over the rows of the last results
        self._timeout, self._concurrency = setup.timeout_seconds, setup.concurrency
        self._late = 0  # rows, each of which may have left a thread behind
        self._since = time.monotonic()
        self._incoming, self._outgoing = bytearray(), bytearray(frame(setup))
        self.line, process_end = socket.socketpair()
        self.line.setblocking(False)
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `close` does
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # so that it can be truncated meanwhile
        with process_end, tempfile.TemporaryFile(buffering=0) as at_work:
            at_work.write(AT_WORK.pack(-1))
            self._begun = mmap.mmap(at_work.fileno(), AT_WORK.size)
            descriptors = process_end.fileno(), at_work.fileno()
            program = PROGRAM.format(path=sys.path, line=descriptors[0], at_work=descriptors[1])
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=descriptors,
                env={"OMP_NUM_THREADS": "1", **os.environ, MARK: mark, TIMEOUT: str(setup.timeout_seconds)},
                start_new_session=True,  # the run handles Ctrl-C
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.poll()

    @property
    def begun(self) -> int:
        """Number of the row that was begun last, if rows are scored one by one; -1 before the first."""
        number: int = AT_WORK.unpack_from(self._begun)[0]
        return number

    @property
    def sending(self) -> bool:
        """True if bytes wait to be sent."""
        return bool(self._outgoing)

    @property
    def spent(self) -> bool:
        """True if threads left behind by late rows may soon delay other rows."""
        return 4 * self._late >= self._concurrency

    @property
    def deadline(self) -> float | None:
        """`time.monotonic()` at which the process is late; None while it has nothing to do."""
        if self.style is None:
            return self._since + START_SECONDS
        if not self.outstanding:
            return None
        if self.style == "async":
            return min(self.outstanding.values()) + self._timeout + GRACE_SECONDS
        return self._since + self._timeout

    @property
    def stopped(self) -> bool:
        """True if a signal stopped the process."""
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def hand_over(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Send rows, by their numbers, for scoring."""
        message = frame(RowsToScore(list(rows), list(rows.values())))
        now = time.monotonic()
        if not self.outstanding:
            self._since = now
        self.outstanding |= dict.fromkeys(rows, now)
        self._outgoing += message
        self.send()

    def send(self) -> None:
        """Send as many of the waiting bytes as the socket accepts."""
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self.line.send(self._outgoing)]

    def receive(self) -> list[Any] | None:
        """Return the messages since the last call, or None if no more will come."""
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
        batches = [message.results.values() for message in messages if isinstance(message, RowResults)]
        results = [result for batch in batches for result in batch]
        self._late += sum(isinstance(result, Failure) and result.late for result in results)
        if messages:
            now = time.monotonic()
            self.seconds_per_answer, self._since = (now - self._since) / max(len(results), 1), now
        return None if closed and not messages else messages

    def output(self) -> str:
        """Return the last output since the current row began."""
        return read_tail(self._output.fileno())

    def bound_output(self) -> None:
        """Discard output longer than `OUTPUT_LIMIT`."""
        if os.fstat(self._output.fileno()).st_size > OUTPUT_LIMIT:
            os.ftruncate(self._output.fileno(), 0)

    def end(self) -> None:
        """Kill the process and everything that it started."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self.close()
        kill_marked(self.mark)

    def ask_to_end(self) -> None:
        """Close the socket. The process then ends by itself if its function lets it."""
        with suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)

    def wait(self, until: float) -> None:
        """Wait for the end of the process; kill it when `time.monotonic()` is `until`."""
        try:
            self._process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)

    def close(self) -> None:
        """Close the files that were open for the process."""
        self.line.close()
        self._output.close()
        self._begun.close()
