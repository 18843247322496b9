"""Batches of rows: the rows that wait, the rows that failed, and the consequences for the batch.

This module knows nothing about processes. Only the pool's thread calls it, except for `ScoringBatch.submit`.
"""

from __future__ import annotations

import collections
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from enginehouse.errors import EnginehouseError
from enginehouse_rewards.program import Failure, RowScore, shorten

OnError = Literal["fail", "zero", "leave_out"]
"""The consequence of a row without a score."""
LEAST_FAILURES = 3
"""Minimum number of rows without a score at which the reward itself is blamed, unless `max_failures` is 0."""


class RewardError(EnginehouseError):
    """A reward raised an error, returned no finite number, ran out of time, or killed its process."""


@dataclass(frozen=True)
class FailurePolicy:
    """Arguments of `RewardPool` that decide the consequences of rows without a score.

    `label` is the reward's name in errors.
    """

    label: str
    timeout_seconds: float
    on_error: OnError
    max_failures: float


class RowGroup:
    """Rows that were submitted together. `future` has their scores, in order."""

    def __init__(self, batch: ScoringBatch, rows: Sequence[Mapping[str, Any]]):
        self.batch = batch
        self.rows = [PendingRow(self, place, values) for place, values in enumerate(rows)]
        self.scores: dict[int, RowScore] = {}
        self.failed = False
        self.future: Future[list[RowScore]] = Future()

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.rows)


@dataclass(eq=False, slots=True)
class PendingRow:
    group: RowGroup
    place: int  # in the group
    values: Mapping[str, Any]
    number: int = 0  # in the batch
    blamed: bool = False  # its process died or was stopped while it had no other row
    alone: bool = False  # it is sent to a process alone, because it may have killed its process

    @property
    def batch(self) -> ScoringBatch:
        return self.group.batch

    @property
    def is_wanted(self) -> bool:
        """True if somebody waits for its score."""
        return self.group in self.batch.groups


class ScoringBatch:
    """Rows whose failures are counted together (`RewardPool.batch`). Errors do not affect other batches."""

    def __init__(self, expected_rows: int, policy: FailurePolicy, put: Callable[[Sequence[RowGroup], bool], None]):
        self.rows = expected_rows  # or the number of received rows, if that is larger
        self.groups: set[RowGroup] = set()  # rows for whose scores a caller waits
        self.waiting: collections.deque[PendingRow] = collections.deque()
        self.alone: collections.deque[PendingRow] = collections.deque()  # sent before these, one by one
        self.failures: list[tuple[PendingRow, Failure]] = []
        self.timeouts = 0  # since the last row that ended
        self.until = math.inf  # by `time.monotonic()`, when a failure that ends the run ends the batch
        self.error: Exception | None = None  # it ended the batch, or is about to
        self._policy = policy
        self._put = put
        self._submitted = 0

    def submit(self, rows: Sequence[Mapping[str, Any]]) -> Future[list[RowScore]]:
        """Submit rows, from any thread.

        Returns:
            A future of their scores, in order. The future raises the same errors as `RewardPool.score`. If the future
            is cancelled, rows that no process has received yet are not scored.
        """
        return self.submit_all([rows])[0]

    def submit_all(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Future[list[RowScore]]]:
        """Submit several groups, and wake the pool once for all of them."""
        submitted = [RowGroup(self, rows) for rows in groups]
        self._put(submitted, False)
        for group in submitted:
            group.future.add_done_callback(partial(self._pass_on_cancelling, group))
        return [group.future for group in submitted]

    def _pass_on_cancelling(self, group: RowGroup, future: Future[list[RowScore]]) -> None:
        if future.cancelled():
            self._put([group], True)

    def add(self, group: RowGroup) -> None:
        """Add a group that was submitted."""
        for row in group.rows:
            row.number, self._submitted = self._submitted, self._submitted + 1
        self.rows = max(self.rows, self._submitted)
        self.groups.add(group)
        self.waiting.extend(group.rows)
        if self.error is not None:
            self.end(self.error)
        elif group.complete:  # it has no rows
            self._settle(group)

    def drop(self, group: RowGroup) -> None:
        """Remove a group that was cancelled."""
        if group in self.groups:
            self._settle(group)
        self.waiting = collections.deque(row for row in self.waiting if row.is_wanted)
        self.alone = collections.deque(row for row in self.alone if row.is_wanted)

    def take(self, most: int) -> list[PendingRow]:
        """Return the next rows to hand out, and stop counting them as waiting."""
        if self.alone:
            return [self.alone.popleft()]
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]

    def fail(self, row: PendingRow, failure: Failure) -> None:
        """Count a row without a score."""
        self.failures.append((row, failure))
        row.group.failed = True
        if self._has_too_many(self.rows):
            self.error = self.error or self._make_error()
        elif self._policy.on_error == "fail":
            self.until = min(self.until, time.monotonic() + self._policy.timeout_seconds)

    def score(self, row: PendingRow, score: RowScore) -> None:
        """Set a row's score. Settle its group if it is complete, unless a failure is about to end the batch."""
        group = row.group
        group.scores[row.place] = score
        if group.complete and self.error is None and not self._ends_run(group.failed):
            self._settle(group)

    def verdict(self) -> Exception | None:
        """Return the error that ends the batch now, or None.

        After a failure that ends the run, further rows are still scored, as long as one row may take. The message then
        knows whether one row fails or many rows do.
        """
        if self.error is None and self._ends_run(bool(self.failures)):
            all_ended = self._submitted == self.rows and all(group.complete for group in self.groups)
            if all_ended or time.monotonic() > self.until:
                self.error = self._make_error()
        return self.error

    def end(self, error: Exception) -> None:
        """Raise an error for all who wait for scores, and score no more rows."""
        self.error = error
        self.waiting.clear()
        self.alone.clear()
        for group in list(self.groups):
            self._settle(group)

    def _settle(self, group: RowGroup) -> None:
        self.groups.remove(group)
        if not group.future.set_running_or_notify_cancel():
            return
        if self.error is not None:
            group.future.set_exception(self.error)
        else:
            group.future.set_result([group.scores[place] for place in range(len(group.rows))])

    def _ends_run(self, failed: bool) -> bool:
        return failed and self._policy.on_error == "fail"

    def _has_too_many(self, rows: int) -> bool:
        """True if so many of `rows` rows failed that the reward is at fault, and not single rows."""
        failed, fraction = len(self.failures), self._policy.max_failures
        return failed > fraction * rows and (failed >= LEAST_FAILURES or fraction == 0)

    def _make_error(self) -> RewardError:
        """Return the error of a batch with failures. It blames single rows or, if there are many, the reward."""
        (row, failure), failed = self.failures[0], len(self.failures)
        tried = self._submitted - len(self.waiting) - len(self.alone)
        line, details = failure_line(row, failure), failure_details(row, failure)
        if self._has_too_many(tried):
            return RewardError(
                f"{self._policy.label}: {failed} of {tried} rows that were tried got no score, more than "
                f"reward.max_failures={self._policy.max_failures:g} allows: the reward is at fault, not single rows. "
                f"Call the reward by hand on the first of these rows: {line}.{details}"
            )
        count_text = f" {failed} of the {tried} rows that were tried got no score." if failed > 1 else ""
        cure = "\nSet reward.on_error=zero to score such rows 0, or leave_out to continue without them."
        return RewardError(f"{self._policy.label}: {line}.{count_text}{cure}{details}")


def put_back(rows: Iterable[PendingRow]) -> None:
    """Queue rows again, in order and before all other rows."""
    for row in reversed(list(rows)):
        if row.is_wanted:
            row.batch.waiting.appendleft(row)


def put_alone(rows: Iterable[PendingRow]) -> None:
    """Queue rows again, so that each row is handed out alone."""
    for row in rows:
        if row.is_wanted:
            row.alone = True
            row.batch.alone.append(row)


def failure_line(row: PendingRow, failure: Failure) -> str:
    return f"sample {row.number} of {row.batch.rows} {failure.what}"


def failure_details(row: PendingRow, failure: Failure) -> str:
    """Return lines with the row, its printed output and the traceback."""
    prompt, response = (shorten(row.values.get(name)) for name in ("prompt", "response"))
    text = f"\n  prompt: {prompt}\n  response: {response}"
    return text + printed_block(failure.output) + (f"\n{failure.trace.rstrip()}" if failure.trace else "")


def printed_block(output: str) -> str:
    return "\n  printed:\n" + textwrap.indent(output, "    ") if output else ""
