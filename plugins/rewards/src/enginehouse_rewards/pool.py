"""Reward functions, run in a pool of processes with a deadline for each response.

A reward is somebody's own code: it may hang, crash or exit. It runs where that costs a row and not the run. A thread of
the pool's own hands rows out as they come and takes scores in; it alone touches processes and batches.
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import os
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from enginehouse.controller.ray_access import ray_access
from enginehouse_rewards.batch import (
    FailurePolicy,
    Group,
    OnError,
    RewardError,
    Row,
    ScoringBatch,
    details,
    printed,
    put_alone,
    put_back,
    said,
)
from enginehouse_rewards.process import START_SECONDS, RewardProcess
from enginehouse_rewards.program import (
    CLOSE_SECONDS,
    Failure,
    Ready,
    Score,
    SetUp,
    Unstartable,
    end_marked,
    named_exit,
    overdue,
)

__all__ = ["RewardError", "RewardPool", "ScoringBatch"]

log = logging.getLogger(__name__)

SPAN_SECONDS = 0.05
"""Cheap rows are handed to a process in spans of about this long, so that a hand-over is paid once a span."""

LOOK_SECONDS = 0.1
"""How often processes are looked at that say nothing."""

FAILED_STARTS = 3
"""So many processes may end one after another before one is ready."""

TIMEOUTS_AT_FIRST, TIMEOUTS_LATER = 3, 10
"""So many rows a process may time out, none ending in between, before the reward is said to hang on every row: while
none ever got a score, and once one has, or where all rows may be without one."""


WAKE_BYTES = 4096
"""So many calls of who submits are answered at once."""


_BECOME = {
    "zero": "scored 0 (reward.on_error=zero) and counted (reward/failures)",
    "leave_out": "left out of their groups (reward.on_error=leave_out) and counted (feed/failed_unscored)",
}


class RewardPool:
    """Scores rows with one function in `processes` processes.

    A process that is gone or stopped while it has nothing to do is replaced, and one of an `async` reward after some
    rows that timed out. One that dies or stops at work is too, and its row is tried once more.

    Args:
        function: `"module:function"`. It gets, by name, what it takes of a row's values, and `arguments`; what it may
            return is said in docs/rewards.md.
        arguments: further keyword arguments of every call.
        name: the reward's in messages, if it is one of several.
        processes: number of processes.
        timeout_seconds: longest time for one row, or one call of a batched reward; its process is ended then.
        concurrency: rows that a process of an `async` reward has at work at once.
        on_error: `"fail"` raises for a row that has no score, `"zero"` scores it 0; `"leave_out"` does too, and who
            asked leaves it out.
        max_failures: share of a batch's rows that may be without a score; where more are, and `LEAST_FAILURES` or it
            is 0, the reward is taken to be broken and the batch raises, whatever `on_error` says.
        python_path: directories to import the function from.
        record: file to write the first failure that does not end the run to.
        may_abstain: whether None is no failure: the row is another reward's to judge.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        processes: int = 1,
        timeout_seconds: float = 30.0,
        concurrency: int = 32,
        on_error: OnError = "fail",
        max_failures: float = 0.5,
        python_path: Sequence[str] = (),
        record: Path | None = None,
        may_abstain: bool = False,
    ):
        self.function = function
        self._named = f"role reward{name and ' '}{name}, method {function}, node {os.uname().nodename}"
        self._policy = FailurePolicy(self._named, timeout_seconds, on_error, max_failures)
        self._concurrency = concurrency
        self._record = record
        self._setup = SetUp(
            function, dict(arguments or {}), list(python_path), timeout_seconds, concurrency, may_abstain
        )
        self._mark = uuid.uuid4().hex
        self._started = 0
        self._failed_starts = 0
        self._seconds_per_row: float | None = None
        self._warned = self._closed = False
        self._submitted: collections.deque[tuple[Group, bool]] = collections.deque()
        self._lock = threading.Lock()  # nothing is submitted to a pool that was closed
        self._waker, self._awake = socket.socketpair()
        self._waker.setblocking(False)
        self._batches: list[ScoringBatch] = []  # those with rows somebody waits for, the oldest first
        self._numbers = itertools.count()
        self._at_work: dict[int, Row] = {}  # by the number a process knows it by
        self._size = processes
        self._processes: list[RewardProcess] = []
        self._fill_up()
        self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self._thread.start()

    def batch(self, expected_rows: int) -> ScoringBatch:
        """A batch to submit rows to as they come, by any thread; others may be under way.

        Args:
            expected_rows: how many there will be: `max_failures` is a share of these.
        """
        return ScoringBatch(expected_rows, self._policy, self._put)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows, in order, as a batch of their own.

        Raises:
            RewardError: a row has no score and `on_error` is `"fail"`; names the row, shows the function's traceback
                and output. Under either policy: more rows than `max_failures` allows have none, the function cannot be
                imported in a process of the pool, rows time out one after another, or the pool was closed.
            ClusterLost: Ray's control service is gone.
        """
        future = self.batch(len(rows)).submit(rows)
        try:
            return future.result()
        finally:
            future.cancel()  # should the wait be interrupted

    def close(self) -> None:
        """End the processes and what they started, busy or not; takes little more than `CLOSE_SECONDS`."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join()

    # By any thread

    def _put(self, groups: Sequence[Group], cancelled: bool) -> None:
        """Bring groups to the thread, or that they were cancelled."""
        with self._lock:
            if not self._closed:
                self._submitted.extend((group, cancelled) for group in groups)
            elif not cancelled:
                for group in groups:
                    group.future.set_exception(self._was_closed())
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full, and so it wakes anyway; or closed
            self._waker.send(b".")

    # By the pool's thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                try:
                    if self._batches or any(process.sending for process in self._processes):
                        self._turn()
                    else:
                        self._rest()
                except Exception as error:  # it is nobody's in particular
                    self._end(list(self._batches), error)
        finally:
            with self._lock:
                self._closed = True
            self._take_submitted()
            self._end(list(self._batches), self._was_closed())
            self._end_processes()

    def _rest(self) -> None:
        """Wait for rows; then see what befell the processes meanwhile."""
        self._awake.recv(WAKE_BYTES)
        self._take_submitted()
        if self._batches:
            for process in list(self._processes):
                if process.exit_code is not None:
                    self._ended(process)
                elif process.stopped:
                    self._blame(process, Failure("was in a process that was stopped"))

    def _turn(self) -> None:
        """Hand out what can be, and take in what comes within `LOOK_SECONDS`."""
        self._fill_up()
        for process in self._processes:
            self._hand_out(process)
        for process in self._wait():
            self._take_in(process)
        for process in list(self._processes):
            self._look_at(process)
        for batch in list(self._batches):
            if (error := batch.verdict()) is not None:
                self._end([batch], error)
            elif not batch.groups:
                self._batches.remove(batch)
        ray_access.look()  # for all who wait for scores: they have nobody else to tell them

    def _take_submitted(self) -> None:
        while self._submitted:
            group, cancelled = self._submitted.popleft()
            batch = group.batch
            if cancelled:
                batch.drop(group)
                continue
            batch.add(group)
            if batch.groups and batch not in self._batches:
                self._batches.append(batch)

    def _end(self, batches: Iterable[ScoringBatch], error: Exception) -> None:
        """End batches, and the processes that are busy with nothing that is wanted: they may hang."""
        for batch in batches:
            batch.end(error)
            self._batches.remove(batch)
        for process in list(self._processes):
            if process.outstanding and not any(self._at_work[number].wanted for number in process.outstanding):
                self._remove(process)

    def _fill_up(self) -> None:
        """Start the processes that are missing."""
        while len(self._processes) < self._size:
            self._started += 1
            try:
                self._processes.append(RewardProcess(self._setup, f"{self._mark}/{self._started}/"))
            except OSError as error:
                raise RewardError(f"{self._named}: a process for it cannot be started: {error}") from error

    def _remove(self, process: RewardProcess) -> list[Row]:
        """End a process and what it started; the rows it had."""
        self._processes.remove(process)
        rows = [self._at_work.pop(number) for number in process.outstanding]
        process.end()
        return rows

    def _end_processes(self) -> None:
        until = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.wait(until)
        end_marked(self._mark)
        for process in self._processes:
            process.close()
        self._waker.close()
        self._awake.close()

    def _hand_out(self, process: RewardProcess) -> None:
        """Give a process rows of the oldest batch that has some waiting."""
        batch = next((batch for batch in self._batches if batch.alone or batch.waiting), None)
        if batch is None or process.style is None or process.spent:
            return
        if process.style == "async" and not (batch.alone or any(self._at_work[n].alone for n in process.outstanding)):
            size = self._concurrency - len(process.outstanding)
        elif process.outstanding:
            return
        elif process.style == "batched":
            size = math.ceil(batch.rows / self._size)
        else:
            worth = SPAN_SECONDS / max(self._seconds_per_row, 1e-9) if self._seconds_per_row is not None else 1
            size = max(1, min(int(worth), math.ceil(len(batch.waiting) / self._size)))
        if rows := {next(self._numbers): row for row in batch.take(size)}:
            self._at_work |= rows
            try:
                process.hand_over({number: row.values for number, row in rows.items()})
            except Exception as error:  # they cannot be pickled
                batch.error = error

    def _wait(self) -> list[RewardProcess]:
        """The processes that say something, or have ended."""
        with selectors.PollSelector() as selector:  # cheaper to make than one of epoll
            selector.register(self._awake, selectors.EVENT_READ)
            for process in self._processes:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.sending else 0)
                selector.register(process.line, events, process)
            ready = [key.data for key, _ in selector.select(LOOK_SECONDS)]
        if None in ready:
            self._awake.recv(WAKE_BYTES)
            self._take_submitted()
        processes = [process for process in ready if process is not None]
        for process in processes:
            process.send()
        return processes

    def _take_in(self, process: RewardProcess) -> None:
        """Take in what a process says."""
        messages = process.receive()
        if messages is None:
            self._ended(process)
            return
        for message in messages:
            if isinstance(message, Unstartable):
                raise RewardError(f"{self._named}: it cannot be imported in a process of the pool: {message.why}")
            if isinstance(message, Ready):
                process.style, self._failed_starts = message.style, 0
                continue
            for number, result in message.results.items():
                if process.outstanding.pop(number, None) is None:
                    continue
                row = self._at_work.pop(number)
                row.batch.timeouts = 0
                if isinstance(result, Failure):
                    self._fail(row, result)
                    continue
                if row.wanted:
                    row.batch.score(row, result)
                took, known = process.seconds_per_answer, self._seconds_per_row
                self._seconds_per_row = took if known is None else known + 0.1 * (took - known)

    def _look_at(self, process: RewardProcess) -> None:
        """See whether a process that said nothing is still there, and in time."""
        process.bound_output()
        if process.exit_code is not None:  # something it started may hold its line open
            self._take_in(process)
            if process in self._processes:
                self._ended(process)
        elif process.deadline is not None and time.monotonic() > process.deadline:
            self._late(process)
        elif process.spent and not process.outstanding:
            self._remove(process)

    def _ended(self, process: RewardProcess) -> None:
        process.wait(time.monotonic() + CLOSE_SECONDS)
        code, output = named_exit(process.exit_code), process.output()
        self._blame(process, Failure(f"took its process down ({code})", output=output))
        if process.style is None:
            self._count_failed_start(code, output)

    def _late(self, process: RewardProcess) -> None:
        stopped, output = process.stopped, process.output()
        if stopped:
            self._blame(process, Failure("was in a process that was stopped", output=output))
            if process.style is None:
                self._count_failed_start("stopped", output)
        elif process.style is None:
            self._remove(process)
            raise RewardError(
                f"{self._named}: importing it did not end within {START_SECONDS:g} s in a process of the pool"
                f"{printed(output)}"
            )
        else:
            rows = self._blame(process, Failure(overdue(self._policy.timeout_seconds), output=output), retry=False)
            for batch in {row.batch for row in rows}:
                self._count_timeout(batch, output)

    def _blame(self, process: RewardProcess, failure: Failure, retry: bool = True) -> list[Row]:
        """End a process and find out which row it was that made it end: it fails, if it is sure to be the one.

        Args:
            process: one that ended, was stopped or is late.
            failure: what is then said of the row.
            retry: whether the row is tried once more before that.

        Returns:
            The rows it was at work on.
        """
        begun, numbers = process.begun, list(process.outstanding)
        rows = self._remove(process)
        if process.style == "single":  # what was scored before and not told yet is scored anew
            at_work = numbers.index(begun) if begun in process.outstanding else 0
            put_back(rows[:at_work] + rows[at_work + 1 :])
            rows = rows[at_work : at_work + 1]
        if len(rows) == 1 and (rows[0].blamed or not retry):
            self._fail(rows[0], failure)
            return rows
        if len(rows) == 1:
            rows[0].blamed = True
        put_alone(rows)
        return rows

    def _count_failed_start(self, how: str, output: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            raise RewardError(
                f"{self._named}: the processes of the pool end before they score a row ({how}). Does importing the "
                f"module exit or crash in a new process?{printed(output)}"
            )

    def _count_timeout(self, batch: ScoringBatch, output: str) -> None:
        batch.timeouts += 1
        all_may_fail = self._policy.on_error != "fail" and self._policy.max_failures == 1
        at_first = self._seconds_per_row is None and not all_may_fail
        limit = TIMEOUTS_AT_FIRST if at_first else TIMEOUTS_LATER
        if batch.timeouts >= limit * self._size and batch.error is None:
            batch.error = RewardError(
                f"{self._named}: the reward seems to hang on every row: {batch.timeouts} calls one after another "
                f"did not return within {self._policy.timeout_seconds:g} s. Call it by hand on a row, or raise "
                f"reward.timeout_seconds.{printed(output)}"
            )

    def _fail(self, row: Row, failure: Failure) -> None:
        """Count a row without a score."""
        batch = row.batch
        if not row.wanted:
            return
        batch.fail(row, failure)
        if self._policy.on_error != "fail" and batch.error is None and not self._warned:
            self._warned = True
            self._warn(row, failure)
        batch.score(row, Score(0.0, {}, failure.what))

    def _warn(self, row: Row, failure: Failure) -> None:
        kept = ""
        if self._record is not None:
            text = f"{self._named}: {said(row, failure)}.{details(row, failure)}\n"
            with suppress(OSError):  # it is no reason to end
                self._record.write_text(text, encoding="utf-8", errors="replace")
                kept = f" {self._record} has its traceback and output."
        log.warning(
            "%s: %s. Such rows are %s; said only once.%s",
            self._named,
            said(row, failure),
            _BECOME[self._policy.on_error],
            kept,
        )

    def _was_closed(self) -> RewardError:
        return RewardError(f"{self._named}: the pool was closed")
