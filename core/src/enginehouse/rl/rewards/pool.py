"""Reward functions, run in a pool of processes with a deadline for each response.

A reward is somebody's own code: it may hang, crash or exit. It runs where that costs a row and not the run.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import selectors
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from enginehouse.config.secrets import from_environment
from enginehouse.controller.ray_access import ray_access
from enginehouse.errors import EnginehouseError
from enginehouse.rl.rewards.process import START_SECONDS, RewardProcess, named_exit
from enginehouse.rl.rewards.program import (
    CLOSE_SECONDS,
    Failure,
    Ready,
    Score,
    SetUp,
    Unstartable,
    end_marked,
    overdue,
    shortened,
)

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan

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

LEAST_FAILURES = 3
"""So many rows without a score say something of the reward, unless none may be: one or two are single rows."""


class RewardError(EnginehouseError):
    """A reward that raised, returned something else than a finite number, ran out of time, or took its process down."""


class _Batch:
    """How far the scoring of a batch has come.

    Attributes:
        waiting: numbers of rows that are to be handed out.
        alone: those of them that are handed out one by one: one of them may have ended its process.
        blamed: how often a row's process died or was stopped while it had no other row.
        failures: rows without a score.
        timeouts: rows that timed out since one ended.
        until: when to stop after a failure that ends the run, by `time.monotonic()`.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows
        self.scores: dict[int, Score] = {}
        self.waiting = collections.deque(range(len(rows)))
        self.alone: collections.deque[int] = collections.deque()
        self.blamed: collections.Counter[int] = collections.Counter()
        self.failures: list[tuple[int, Failure]] = []
        self.timeouts = 0
        self.until = math.inf


class RewardPool:
    """Scores rows with one function in `processes` processes.

    A process that is gone or stopped while it has nothing to do is replaced. One that dies or stops at work is too, and
    its row is tried once more.

    Args:
        function: `"module:function"`. It gets, by name, what it takes of a row's values, and `arguments`; what it may
            return is said in docs/rewards.md.
        arguments: further keyword arguments of every call.
        processes: number of processes.
        timeout_seconds: longest time for one row, or one call of a batched reward; its process is ended then.
        concurrency: rows that a process of an `async` reward has at work at once.
        on_error: `"fail"` raises for a row that has no score, `"zero"` scores it 0.
        max_failures: share of a batch's rows that may be without a score; where more are, and `LEAST_FAILURES` or it
            is 0, the reward is taken to be broken and the batch raises, whatever `on_error` says.
        python_path: directories to import the function from.
        record: file to write the first failure that is scored 0 to.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        timeout_seconds: float = 30.0,
        concurrency: int = 32,
        on_error: Literal["fail", "zero"] = "fail",
        max_failures: float = 0.5,
        python_path: Sequence[str] = (),
        record: Path | None = None,
    ):
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.concurrency = concurrency
        self.on_error = on_error
        self.max_failures = max_failures
        self.record = record
        self._setup = SetUp(function, dict(arguments or {}), list(python_path), timeout_seconds)
        self._mark = uuid.uuid4().hex
        self._started = 0
        self._failed_starts = 0
        self._seconds_per_row: float | None = None
        self._warned = self._closed = False
        self._processes = [self._start() for _ in range(processes)]

    @classmethod
    def of(cls, plan: Plan) -> RewardPool:
        """The pool a plan asks for."""
        reward = plan.config.reward
        return cls(
            plan.reward,
            from_environment(plan.reward_arguments),
            processes=reward.processes,
            timeout_seconds=reward.timeout_seconds,
            concurrency=reward.concurrency,
            on_error=reward.on_error,
            max_failures=reward.max_failures,
            python_path=plan.python_path,
            record=plan.run_directory / "reward_error.txt",
        )

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows, in order.

        After a failure that ends the run, rows are scored for one more deadline: whether one row fails or many decides
        what there is to do about it.

        Raises:
            RewardError: a row has no score and `on_error` is `"fail"`; names the row, shows the function's traceback
                and output. Under either policy: more rows than `max_failures` allows have none, the function cannot be
                imported in a process of the pool, rows time out one after another, or the pool was closed.
        """
        batch = _Batch(rows)
        try:
            for process in list(self._processes):  # what befell them since the last batch
                if process.exit_code is not None:
                    self._ended(batch, process)
                elif process.stopped:
                    self._replace(process)
            while len(batch.scores) < len(rows) and time.monotonic() < batch.until:
                for process in self._processes:
                    self._hand_out(batch, process)
                for process in self._wait():
                    self._take_in(batch, process)
                for process in list(self._processes):
                    self._look_at(batch, process)
                ray_access.look()
            if batch.failures and self.on_error == "fail":
                raise self._failed(batch)
            return [batch.scores[number] for number in range(len(rows))]
        except BaseException as error:
            for process in self._processes:
                if process.outstanding:
                    process.abandon()  # the next batch begins with another
            if self._closed and isinstance(error, (OSError, ValueError)):  # its lines and files were closed meanwhile
                raise self._was_closed() from error
            raise

    def close(self) -> None:
        """End the processes and what they started, busy or not; takes little more than `CLOSE_SECONDS`."""
        self._closed = True
        until = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.ask_to_end()
        for process in self._processes:
            process.wait(until)
        end_marked(self._mark)
        for process in self._processes:
            process.close()

    def _start(self) -> RewardProcess:
        self._started += 1
        try:
            return RewardProcess(self._setup, f"{self._mark}/{self._started}/")
        except OSError as error:
            raise RewardError(f"{self._named()}: a process for it cannot be started: {error}") from error

    def _replace(self, process: RewardProcess) -> None:
        process.end()
        if self._closed:
            raise self._was_closed()
        self._processes[self._processes.index(process)] = self._start()

    def _hand_out(self, batch: _Batch, process: RewardProcess) -> None:
        if process.style is None:
            return
        if process.style == "async" and not batch.alone:
            size = self.concurrency - len(process.outstanding)
        elif process.outstanding:
            return
        elif process.style == "batched":
            size = math.ceil(len(batch.rows) / len(self._processes))
        else:
            worth = SPAN_SECONDS / max(self._seconds_per_row, 1e-9) if self._seconds_per_row is not None else 1
            size = max(1, min(int(worth), math.ceil(len(batch.waiting) / len(self._processes))))
        if batch.alone:
            numbers = [batch.alone.popleft()]
        else:
            numbers = [batch.waiting.popleft() for _ in range(min(size, len(batch.waiting)))]
        if numbers:
            process.hand_over({number: batch.rows[number] for number in numbers})

    def _wait(self) -> list[RewardProcess]:
        """The processes that say something, or have ended."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.sending else 0)
                selector.register(process.line, events, process)
            ready = selector.select(LOOK_SECONDS)
        for key, _ in ready:
            key.data.send()
        return [key.data for key, _ in ready]

    def _take_in(self, batch: _Batch, process: RewardProcess) -> None:
        """Take in what a process says."""
        messages = process.receive()
        if messages is None:
            self._ended(batch, process)
            return
        for message in messages:
            if isinstance(message, Unstartable):
                raise RewardError(f"{self._named()}: it cannot be imported in a process of the pool: {message.why}")
            if isinstance(message, Ready):
                process.style, self._failed_starts = message.style, 0
                continue
            for number, result in message.results.items():
                if process.outstanding.pop(number, None) is None:
                    continue
                batch.timeouts = 0
                if isinstance(result, Failure):
                    self._fail(batch, number, result)
                    continue
                batch.scores[number] = result
                took, known = process.seconds_per_answer, self._seconds_per_row
                self._seconds_per_row = took if known is None else known + 0.1 * (took - known)

    def _look_at(self, batch: _Batch, process: RewardProcess) -> None:
        """See whether a process that said nothing is still there, and in time."""
        if process not in self._processes:
            return
        process.bound_output()
        if process.exit_code is not None:  # something it started may hold its line open
            self._take_in(batch, process)
            if process in self._processes:
                self._ended(batch, process)
        elif process.deadline is not None and time.monotonic() > process.deadline:
            self._late(batch, process)

    def _ended(self, batch: _Batch, process: RewardProcess) -> None:
        process.wait(time.monotonic() + CLOSE_SECONDS)
        code, output, starting = named_exit(process.exit_code), process.output(), process.style is None
        self._replace(process)
        if starting:
            self._count_failed_start(code, output)
        self._blame(batch, process, Failure(f"took its process down ({code})", output=output))

    def _late(self, batch: _Batch, process: RewardProcess) -> None:
        stopped, output, starting = process.stopped, process.output(), process.style is None
        self._replace(process)
        if stopped:
            if starting:
                self._count_failed_start("stopped", output)
            self._blame(batch, process, Failure("was in a process that was stopped", output=output))
        elif starting:
            raise RewardError(
                f"{self._named()}: importing it did not end within {START_SECONDS:g} s in a process of the pool"
                f"{_printed(output)}"
            )
        else:
            batch.timeouts += 1
            self._blame(batch, process, Failure(overdue(self.timeout_seconds), output=output), retry=False)
            all_may_fail = self.on_error == "zero" and self.max_failures == 1
            at_first = self._seconds_per_row is None and not all_may_fail
            limit = TIMEOUTS_AT_FIRST if at_first else TIMEOUTS_LATER
            if batch.timeouts >= limit * len(self._processes):
                raise RewardError(
                    f"{self._named()}: the reward seems to hang on every row: {batch.timeouts} calls one after another "
                    f"did not return within {self.timeout_seconds:g} s. Call it by hand on a row, or raise "
                    f"reward.timeout_seconds.{_printed(output)}"
                )

    def _blame(self, batch: _Batch, process: RewardProcess, failure: Failure, retry: bool = True) -> None:
        """Find out which row it was that ended a process, or had it ended: it fails, if it is sure to be the one.

        Args:
            process: the process that is no more.
            failure: what is then said of the row.
            retry: whether the row is tried once more before that.
        """
        rows = list(process.outstanding)
        if process.style == "single":  # only the first had begun
            batch.waiting.extendleft(reversed(rows[1:]))
            rows = rows[:1]
        if len(rows) == 1 and (batch.blamed[rows[0]] or not retry):
            self._fail(batch, rows[0], failure)
            return
        if len(rows) == 1:
            batch.blamed[rows[0]] += 1
        batch.alone.extend(rows)

    def _count_failed_start(self, how: str, output: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            raise RewardError(
                f"{self._named()}: the processes of the pool end before they score a row ({how}). Does importing the "
                f"module exit or crash in a new process?{_printed(output)}"
            )

    def _fail(self, batch: _Batch, number: int, failure: Failure) -> None:
        """Count a row without a score; raise where there are too many."""
        batch.scores[number] = Score(0.0, {}, failure.what)
        batch.failures.append((number, failure))
        if self._too_many(batch, len(batch.rows)):
            raise self._failed(batch)
        if self.on_error == "fail":
            batch.until = min(batch.until, time.monotonic() + self.timeout_seconds)
        elif not self._warned:
            self._warned = True
            self._warn(batch, number, failure)

    def _warn(self, batch: _Batch, number: int, failure: Failure) -> None:
        kept = ""
        if self.record is not None:
            text = f"{self._named()}: {_what(batch, number, failure)}.{_details(batch, number, failure)}\n"
            with suppress(OSError):  # it is no reason to end
                self.record.write_text(text, encoding="utf-8", errors="replace")
                kept = f" {self.record} has its traceback and output."
        log.warning(
            "%s: %s. Such rows are scored 0 (reward.on_error=zero) and counted (reward/failures); said only once.%s",
            self._named(),
            _what(batch, number, failure),
            kept,
        )

    def _too_many(self, batch: _Batch, rows: int) -> bool:
        """Whether more of so many rows have no score than can be laid on single ones."""
        failed = len(batch.failures)
        return failed > self.max_failures * rows and (failed >= LEAST_FAILURES or self.max_failures == 0)

    def _failed(self, batch: _Batch) -> RewardError:
        """What ends the run because of rows without a score: single ones, or so many that the reward is to blame."""
        (number, failure), failed = batch.failures[0], len(batch.failures)
        tried = len(batch.rows) - len(batch.waiting) - len(batch.alone)
        what, details = _what(batch, number, failure), _details(batch, number, failure)
        if self._too_many(batch, tried):
            return RewardError(
                f"{self._named()}: {failed} of {tried} rows that were tried got no score, more than "
                f"reward.max_failures={self.max_failures:g} allows: the reward is at fault, not single rows. Call "
                f"it by hand on the first of them: {what}.{details}"
            )
        others = f" {failed} of the {tried} rows that were tried got no score." if failed > 1 else ""
        cure = "\nSet reward.on_error=zero to score such rows 0 and go on."
        return RewardError(f"{self._named()}: {what}.{others}{cure}{details}")

    def _was_closed(self) -> RewardError:
        return RewardError(f"{self._named()}: the pool was closed")

    def _named(self) -> str:
        return f"role reward, method {self.function}, node {os.uname().nodename}"


def _what(batch: _Batch, number: int, failure: Failure) -> str:
    return f"sample {number} of {len(batch.rows)} {failure.what}"


def _details(batch: _Batch, number: int, failure: Failure) -> str:
    """The row, what it printed and the traceback, on lines of their own."""
    row = batch.rows[number]
    text = f"\n  prompt: {shortened(row.get('prompt'))}\n  response: {shortened(row.get('response'))}"
    return text + _printed(failure.output) + (f"\n{failure.trace.rstrip()}" if failure.trace else "")


def _printed(output: str) -> str:
    return "\n  printed:\n" + textwrap.indent(output, "    ") if output else ""
