"""Rows that count together, as those of a step do: which of them wait, which failed, and what that means for all.

Knows no process. The pool's thread alone calls it, but for `ScoringBatch.submit`.
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
from enginehouse_rewards.program import Failure, Score, shortened

OnError = Literal["fail", "zero", "leave_out"]
"""What becomes of a row without a score."""
LEAST_FAILURES = 3
"""So many rows without a score say something of the reward, unless none may be: one or two are single rows."""


class RewardError(EnginehouseError):
    """A reward that raised, returned something else than a finite number, ran out of time, or took its process down."""


@dataclass(frozen=True)
class FailurePolicy:
    """What rows without a score mean. `named` is the reward in errors; the others are arguments of `RewardPool`."""

    named: str
    timeout_seconds: float
    on_error: OnError
    max_failures: float


class Group:
    """Rows that were submitted together; `future` has their scores, in order."""

    def __init__(self, batch: ScoringBatch, rows: Sequence[Mapping[str, Any]]):
        self.batch = batch
        self.rows = [Row(self, place, values) for place, values in enumerate(rows)]
        self.scores: dict[int, Score] = {}
        self.failed = False
        self.future: Future[list[Score]] = Future()

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.rows)


@dataclass(eq=False, slots=True)
class Row:
    """A row of a group.

    Attributes:
        place: in the group.
        number: in the batch.
        blamed: whether its process died or was stopped while it had no other row.
        alone: whether it is handed out alone: it may have ended its process.
    """

    group: Group
    place: int
    values: Mapping[str, Any]
    number: int = 0
    blamed: bool = False
    alone: bool = False

    @property
    def batch(self) -> ScoringBatch:
        return self.group.batch

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for its score."""
        return self.group in self.batch.groups


class ScoringBatch:
    """Rows that count together; `RewardPool.batch` makes one. Its errors are no other batch's.

    Attributes:
        rows: number of rows that are expected, or have come if that is more.
        groups: those whose scores somebody waits for.
        waiting: rows that are to be handed out.
        alone: those that are handed out before these, one by one.
        failures: rows without a score.
        timeouts: rows that timed out since one ended.
        until: when to stop after a failure that ends the run, by `time.monotonic()`.
        error: what ended the batch, or is about to.
    """

    def __init__(self, expected_rows: int, policy: FailurePolicy, put: Callable[[Sequence[Group], bool], None]):
        self.rows = expected_rows
        self.groups: set[Group] = set()
        self.waiting: collections.deque[Row] = collections.deque()
        self.alone: collections.deque[Row] = collections.deque()
        self.failures: list[tuple[Row, Failure]] = []
        self.timeouts = 0
        self.until = math.inf
        self.error: Exception | None = None
        self._policy = policy
        self._put = put
        self._submitted = 0

    def submit(self, rows: Sequence[Mapping[str, Any]]) -> Future[list[Score]]:
        """Have rows scored; by any thread.

        Returns:
            A future of their scores, in order; it raises as `RewardPool.score`. Where it is cancelled, those rows are
            not scored that no process has yet.
        """
        return self.submit_all([rows])[0]

    def submit_all(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Future[list[Score]]]:
        """`submit` of each; the pool is woken once for all."""
        submitted = [Group(self, rows) for rows in groups]
        self._put(submitted, False)
        for group in submitted:
            group.future.add_done_callback(partial(self._cancelled, group))
        return [group.future for group in submitted]

    def _cancelled(self, group: Group, future: Future[list[Score]]) -> None:
        if future.cancelled():
            self._put([group], True)

    def add(self, group: Group) -> None:
        """Take in rows that were submitted."""
        for row in group.rows:
            row.number, self._submitted = self._submitted, self._submitted + 1
        self.rows = max(self.rows, self._submitted)
        self.groups.add(group)
        self.waiting.extend(group.rows)
        if self.error is not None:
            self.end(self.error)
        elif group.complete:  # it has no rows
            self._settle(group)

    def drop(self, group: Group) -> None:
        """Forget a group that was cancelled."""
        if group in self.groups:
            self._settle(group)
        self.waiting = collections.deque(row for row in self.waiting if row.wanted)
        self.alone = collections.deque(row for row in self.alone if row.wanted)

    def take(self, most: int) -> list[Row]:
        """The next rows to hand out."""
        if self.alone:
            return [self.alone.popleft()]
        return [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]

    def fail(self, row: Row, failure: Failure) -> None:
        """Count a row without a score."""
        self.failures.append((row, failure))
        row.group.failed = True
        if self._too_many(self.rows):
            self.error = self.error or self._failed()
        elif self._policy.on_error == "fail":
            self.until = min(self.until, time.monotonic() + self._policy.timeout_seconds)

    def score(self, row: Row, score: Score) -> None:
        """Set a row's score, and its group's if it was the last; but not where a failure is to end the batch."""
        group = row.group
        group.scores[row.place] = score
        if group.complete and self.error is None and not self._ending(group.failed):
            self._settle(group)

    def verdict(self) -> Exception | None:
        """What ends the batch now.

        After a failure that ends the run, rows are scored for one more deadline: whether one row fails or many decides
        what there is to do about it.
        """
        if self.error is None and self._ending(bool(self.failures)):
            all_ended = self._submitted == self.rows and all(group.complete for group in self.groups)
            if all_ended or time.monotonic() > self.until:
                self.error = self._failed()
        return self.error

    def end(self, error: Exception) -> None:
        """Set an error where scores are waited for; none is scored any more."""
        self.error = error
        self.waiting.clear()
        self.alone.clear()
        for group in list(self.groups):
            self._settle(group)

    def _settle(self, group: Group) -> None:
        self.groups.remove(group)
        if not group.future.set_running_or_notify_cancel():
            return
        if self.error is not None:
            group.future.set_exception(self.error)
        else:
            group.future.set_result([group.scores[place] for place in range(len(group.rows))])

    def _ending(self, failed: bool) -> bool:
        return failed and self._policy.on_error == "fail"

    def _too_many(self, rows: int) -> bool:
        """Whether more of so many rows have no score than can be laid on single ones."""
        failed, share = len(self.failures), self._policy.max_failures
        return failed > share * rows and (failed >= LEAST_FAILURES or share == 0)

    def _failed(self) -> RewardError:
        """What ends the run because of rows without a score: single ones, or so many that the reward is to blame."""
        (row, failure), failed = self.failures[0], len(self.failures)
        tried = self._submitted - len(self.waiting) - len(self.alone)
        what, shown = said(row, failure), details(row, failure)
        if self._too_many(tried):
            return RewardError(
                f"{self._policy.named}: {failed} of {tried} rows that were tried got no score, more than "
                f"reward.max_failures={self._policy.max_failures:g} allows: the reward is at fault, not single rows. "
                f"Call it by hand on the first of them: {what}.{shown}"
            )
        others = f" {failed} of the {tried} rows that were tried got no score." if failed > 1 else ""
        cure = "\nSet reward.on_error=zero to score such rows 0 and go on, or leave_out to go on without them."
        return RewardError(f"{self._policy.named}: {what}.{others}{cure}{shown}")


def put_back(rows: Iterable[Row]) -> None:
    """Have rows handed out once more, first of all and in order."""
    for row in reversed(list(rows)):
        if row.wanted:
            row.batch.waiting.appendleft(row)


def put_alone(rows: Iterable[Row]) -> None:
    """Have rows handed out once more, each alone."""
    for row in rows:
        if row.wanted:
            row.alone = True
            row.batch.alone.append(row)


def said(row: Row, failure: Failure) -> str:
    """A failure in a line."""
    return f"sample {row.number} of {row.batch.rows} {failure.what}"


def details(row: Row, failure: Failure) -> str:
    """The row, what it printed and the traceback, on lines of their own."""
    prompt, response = (shortened(row.values.get(name)) for name in ("prompt", "response"))
    text = f"\n  prompt: {prompt}\n  response: {response}"
    return text + printed(failure.output) + (f"\n{failure.trace.rstrip()}" if failure.trace else "")


def printed(output: str) -> str:
    """What was printed, on lines of their own."""
    return "\n  printed:\n" + textwrap.indent(output, "    ") if output else ""
