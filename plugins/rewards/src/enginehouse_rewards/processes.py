"""The processes of a reward pool, and the rows that each one scores. Only the pool's thread calls this module."""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from enginehouse_rewards.batch import (
    FailurePolicy,
    PendingRow,
    RewardError,
    ScoringBatch,
    failure_details,
    failure_line,
    printed_block,
    put_alone,
    put_back,
)
from enginehouse_rewards.process import START_SECONDS, RewardProcess
from enginehouse_rewards.program import (
    CLOSE_SECONDS,
    Failure,
    Ready,
    RowScore,
    SetUp,
    Unstartable,
    kill_marked,
    name_exit,
    overdue_text,
)

log = logging.getLogger(__name__)

SPAN_SECONDS = 0.05
"""Cheap rows are handed to a process in portions of about this duration, so that each message carries many rows."""

FAILED_STARTS = 3
"""The pool gives up after this many consecutive processes have ended before they were ready."""

TIMEOUTS_AT_FIRST, TIMEOUTS_LATER = 3, 10
"""Consecutive timeouts per process after which the reward counts as hanging on every row. The first number applies
before any row got a score; the second applies later, or if all rows may go without a score."""

_CONSEQUENCES = {
    "zero": "scored 0 (reward.on_error=zero) and counted (reward/failures)",
    "leave_out": "left out of their groups (reward.on_error=leave_out) and counted (feed/failed_unscored)",
}


class RewardProcesses:
    """Hands rows to processes, and finds out which row is to blame when a process dies, stops or hangs.

    An idle process that died or stopped is replaced, and so is a process of an `async` reward after some timeouts. If a
    busy process dies or stops, it is replaced and its row is tried once more.
    """

    def __init__(self, setup: SetUp, policy: FailurePolicy, size: int, record: Path | None):
        self._setup, self._policy, self._size, self._record = setup, policy, size, record
        self._mark = uuid.uuid4().hex
        self._started = 0
        self._failed_starts = 0
        self._seconds_per_row: float | None = None
        self._warned = False
        self._numbers = itertools.count()
        self._at_work: dict[int, PendingRow] = {}  # by the number that a process knows
        self.processes: list[RewardProcess] = []
        self.start_missing()

    @property
    def sending(self) -> bool:
        """True if a process has bytes left to send."""
        return any(process.sending for process in self.processes)

    def start_missing(self) -> None:
        """Start processes until there are `size` of them."""
        while len(self.processes) < self._size:
            self._started += 1
            try:
                self.processes.append(RewardProcess(self._setup, f"{self._mark}/{self._started}/"))
            except OSError as error:
                raise RewardError(f"{self._policy.label}: a process of the pool cannot be started: {error}") from error

    def hand_out(self, batches: Sequence[ScoringBatch]) -> None:
        """Hand waiting rows, from the first batch that has any, to each process that can take more."""
        for process in self.processes:
            batch = next((batch for batch in batches if batch.alone or batch.waiting), None)
            if batch is None:
                return
            room = self._count_room(process, batch)
            if room and (rows := {next(self._numbers): row for row in batch.take(room)}):
                self._at_work |= rows
                try:
                    process.hand_over({number: row.values for number, row in rows.items()})
                except Exception as error:  # they cannot be pickled
                    batch.error = error

    def take_in(self, process: RewardProcess) -> None:
        """Read the messages of a process, and settle its rows."""
        messages = process.receive()
        if messages is None:
            self._handle_end(process)
            return
        for message in messages:
            if isinstance(message, Unstartable):
                raise RewardError(
                    f"{self._policy.label}: a process of the pool cannot import the function: {message.why}"
                )
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
                if row.is_wanted:
                    row.batch.score(row, result)
                seconds, average = process.seconds_per_answer, self._seconds_per_row
                self._seconds_per_row = seconds if average is None else average + 0.1 * (seconds - average)

    def check_busy(self) -> None:
        """Handle processes that ended silently, are late, or have left too many threads behind."""
        for process in list(self.processes):
            process.bound_output()
            if process.exit_code is not None:  # a program that it started may keep its socket open
                self.take_in(process)
                if process in self.processes:
                    self._handle_end(process)
            elif process.deadline is not None and time.monotonic() > process.deadline:
                self._handle_lateness(process)
            elif process.spent and not process.outstanding:
                self._remove(process)

    def check_idle(self) -> None:
        """Replace processes that ended or were stopped while they had nothing to do."""
        for process in list(self.processes):
            if process.exit_code is not None:
                self._handle_end(process)
            elif process.stopped:
                self._blame(process, Failure("was in a process that was stopped"))

    def end_unwanted(self) -> None:
        """End processes whose rows nobody waits for any more, because they may hang."""
        for process in list(self.processes):
            if process.outstanding and not any(self._at_work[number].is_wanted for number in process.outstanding):
                self._remove(process)

    def close(self) -> None:
        """End all processes and everything that they started, within little more than `CLOSE_SECONDS`."""
        until = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.wait(until)
        kill_marked(self._mark)
        for process in self.processes:
            process.close()

    def _count_room(self, process: RewardProcess, batch: ScoringBatch) -> int:
        """Return how many rows of the batch the process can take now."""
        if process.style is None or process.spent:
            return 0
        has_row_alone = batch.alone or any(self._at_work[number].alone for number in process.outstanding)
        if process.style == "async" and not has_row_alone:
            return self._setup.concurrency - len(process.outstanding)
        if process.outstanding:
            return 0
        if process.style == "batched":
            return math.ceil(batch.rows / self._size)
        span = SPAN_SECONDS / max(self._seconds_per_row, 1e-9) if self._seconds_per_row is not None else 1
        return max(1, min(int(span), math.ceil(len(batch.waiting) / self._size)))

    def _remove(self, process: RewardProcess) -> list[PendingRow]:
        """Kill a process and everything that it started; return the rows that it had."""
        self.processes.remove(process)
        rows = [self._at_work.pop(number) for number in process.outstanding]
        process.end()
        return rows

    def _handle_end(self, process: RewardProcess) -> None:
        process.wait(time.monotonic() + CLOSE_SECONDS)
        code, output = name_exit(process.exit_code), process.output()
        self._blame(process, Failure(f"took its process down ({code})", output=output))
        if process.style is None:
            self._count_failed_start(code, output)

    def _handle_lateness(self, process: RewardProcess) -> None:
        stopped, output = process.stopped, process.output()
        if stopped:
            self._blame(process, Failure("was in a process that was stopped", output=output))
            if process.style is None:
                self._count_failed_start("stopped", output)
        elif process.style is None:
            self._remove(process)
            raise RewardError(
                f"{self._policy.label}: a process of the pool did not import the function within {START_SECONDS:g} s"
                f"{printed_block(output)}"
            )
        else:
            failure = Failure(overdue_text(self._policy.timeout_seconds), output=output)
            for batch in {row.batch for row in self._blame(process, failure, retry=False)}:
                self._count_timeout(batch, output)

    def _blame(self, process: RewardProcess, failure: Failure, retry: bool = True) -> list[PendingRow]:
        """Kill a process and find the row that is to blame. A row fails only if no other row can be to blame. With
        `retry`, the row is tried once more before it fails. Returns the rows that the process was scoring."""
        begun, numbers = process.begun, list(process.outstanding)
        rows = self._remove(process)
        if process.style == "single":  # rows that were scored but not yet reported are scored again
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
                f"{self._policy.label}: the processes of the pool end before they score a row ({how}). Does importing "
                f"the module exit or crash in a new process?{printed_block(output)}"
            )

    def _count_timeout(self, batch: ScoringBatch, output: str) -> None:
        batch.timeouts += 1
        all_may_fail = self._policy.on_error != "fail" and self._policy.max_failures == 1
        at_first = self._seconds_per_row is None and not all_may_fail
        limit = TIMEOUTS_AT_FIRST if at_first else TIMEOUTS_LATER
        if batch.timeouts >= limit * self._size and batch.error is None:
            batch.error = RewardError(
                f"{self._policy.label}: the reward seems to hang on every row: {batch.timeouts} calls one after "
                f"another did not return within {self._policy.timeout_seconds:g} s. Call it by hand on a row, or raise "
                f"reward.timeout_seconds.{printed_block(output)}"
            )

    def _fail(self, row: PendingRow, failure: Failure) -> None:
        batch = row.batch
        if not row.is_wanted:
            return
        batch.fail(row, failure)
        if self._policy.on_error != "fail" and batch.error is None and not self._warned:
            self._warned = True
            self._warn(row, failure)
        batch.score(row, RowScore(0.0, {}, failure.what))

    def _warn(self, row: PendingRow, failure: Failure) -> None:
        line, pointer = failure_line(row, failure), ""
        if self._record is not None:
            text = f"{self._policy.label}: {line}.{failure_details(row, failure)}\n"
            with suppress(OSError):  # a full disk must not end the run
                self._record.write_text(text, encoding="utf-8", errors="replace")
                pointer = f" {self._record} has its traceback and output."
        consequence = _CONSEQUENCES[self._policy.on_error]
        log.warning(
            "%s: %s. Such rows are %s; this is reported only once.%s", self._policy.label, line, consequence, pointer
        )
