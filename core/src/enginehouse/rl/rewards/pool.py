"""Reward functions, run in a pool of processes with a deadline for each response.

A reward is somebody's own code: it may hang, crash or exit. It runs where that costs a row and not the run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pebble

from enginehouse.errors import EnginehouseError
from enginehouse.plugin.records import resolve

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan

TARGET_CHUNK_SECONDS = 0.05
"""Cheap rewards are sent in chunks of about this long, so that a call's overhead is paid once a chunk."""

CHUNK_SHARE_OF_DEADLINE = 0.25
"""Rows as slow as the slowest that was seen use up at most this share of their chunk's deadline."""

CONSECUTIVE_TIMEOUTS = 3
"""So many rows a process may time out, none ending in between, before the reward is said to hang on every row."""

CLOSE_SECONDS = 2.0
"""Longest time the processes get to end by themselves."""


class RewardError(EnginehouseError):
    """A reward that raised, returned something else than a finite number, ran out of time, or took its process down."""


class _Unstartable(Exception):
    """The function cannot be had in the pool's processes."""


class _NoScore(NamedTuple):
    """Why a row has no score. Plain text: an exception may not survive its way to another process."""

    what: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class _Scored:
    """What a process says of a chunk: a score or a reason for each row, and what the rows took, in seconds."""

    results: list[float | _NoScore]
    seconds: float
    slowest: float


_function: Any = None
_arguments: dict[str, Any] = {}
_unstartable = ""


def _start(reference: str, arguments: Mapping[str, Any], python_path: Sequence[str]) -> None:
    """Set a pool process up: resolve the function once.

    An error is kept for `_score` to raise: the pool would only say that its process ended, and start the next.
    """
    global _function, _arguments, _unstartable
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [path for path in python_path if path not in sys.path]
    _arguments = dict(arguments)
    try:
        _function = resolve(reference)
    except (Exception, SystemExit) as error:
        _unstartable = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _score(rows: Sequence[Mapping[str, Any]]) -> _Scored:
    if _unstartable:
        raise _Unstartable(_unstartable)
    results, slowest = [], 0.0
    first = started = time.perf_counter()
    for row in rows:
        results.append(_score_row(row))
        ended = time.perf_counter()
        slowest = max(slowest, ended - started)
        started = ended
    return _Scored(results, started - first, slowest)


def _score_row(row: Mapping[str, Any]) -> float | _NoScore:
    try:
        returned = _function(**row, **_arguments)
    except (Exception, SystemExit) as error:
        return _NoScore(f"raised {type(error).__name__}: {error}", traceback.format_exc())
    try:
        score = math.nan if isinstance(returned, str | bytes | bytearray) else float(returned)
    except Exception:
        score = math.nan
    if math.isfinite(score):
        return score
    if isinstance(returned, float) or hasattr(returned, "dtype"):
        return _NoScore(f"returned {returned}, and a reward has to be a finite number")
    return _NoScore(f"returned {_short(returned)} ({type(returned).__name__}) instead of a number")


class RewardPool:
    """Scores rows with one function in `processes` processes.

    Args:
        function: `"module:function"`, called with keywords only: `prompt`, `response`, `finish_reason`, the data set's
            other columns, and `arguments`. Returns whatever `float()` takes, except text; finite.
        arguments: further keyword arguments of every call.
        processes: number of processes.
        timeout_seconds: longest time for one row; its process is killed then.
        on_error: `"fail"` raises for a row that has no score, `"zero"` scores it 0 and counts it in `failures`.
        python_path: directories to import the function from.
    """

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        timeout_seconds: float = 30.0,
        on_error: Literal["fail", "zero"] = "fail",
        python_path: Sequence[str] = (),
    ):
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.on_error = on_error
        self.processes = processes
        self.failures = 0
        self._seconds_per_row: float | None = None
        self._slowest_row = 0.0
        self._pool = pebble.ProcessPool(
            max_workers=processes,
            initializer=_start,
            initargs=(function, dict(arguments or {}), list(python_path)),
            context=multiprocessing.get_context("spawn"),
        )

    @classmethod
    def of(cls, plan: Plan) -> RewardPool:
        """The pool a plan asks for."""
        reward = plan.config.reward
        return cls(
            plan.reward,
            reward.arguments,
            processes=reward.processes,
            timeout_seconds=reward.timeout_seconds,
            on_error=reward.on_error,
            python_path=plan.python_path,
        )

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score rows, in order.

        Rows go out alone until their cost is known, then in chunks that end well before the deadline of one row. A
        chunk that does not is computed again, row by row.

        Raises:
            RewardError: a row has no score and `on_error` is `"fail"`; names the row, shows the function's traceback.
                Under either policy: the function cannot be imported in a process of the pool, or `processes` times
                `CONSECUTIVE_TIMEOUTS` rows timed out with none ending in between.
        """
        scores = [0.0] * len(rows)
        size = self._rows_per_chunk(len(rows))
        waiting = collections.deque(range(start, min(start + size, len(rows))) for start in range(0, len(rows), size))
        running: dict[concurrent.futures.Future[_Scored], range] = {}
        seconds, slowest, timeouts = 0.0, 0.0, 0
        try:
            while waiting or running:
                # No more than keeps the processes busy: after a time-out what waits is cut anew.
                while waiting and len(running) < 2 * self.processes:
                    span = waiting.popleft()
                    running[self._schedule([rows[index] for index in span])] = span
                done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in sorted(done, key=lambda one: running[one].start):
                    span = running.pop(future)
                    try:
                        scored = future.result()
                    except (concurrent.futures.TimeoutError, pebble.ProcessExpired) as error:
                        if isinstance(error, concurrent.futures.TimeoutError):
                            timeouts += 1
                            waiting = _alone(waiting)
                        if len(span) > 1:
                            waiting.extendleft(reversed(_alone([span])))
                            continue
                        self._failed(span.start, rows[span.start], self._ended_by(error))
                        if timeouts >= CONSECUTIVE_TIMEOUTS * self.processes:
                            raise self._hanging(timeouts) from error
                        continue
                    except (_Unstartable, BrokenProcessPool) as error:
                        raise self._broken(error) from error
                    timeouts = 0
                    seconds, slowest = seconds + scored.seconds, max(slowest, scored.slowest)
                    for index, result in zip(span, scored.results, strict=True):
                        if isinstance(result, _NoScore):
                            self._failed(index, rows[index], result)
                        else:
                            scores[index] = result
        except BaseException:
            for future in running:
                future.cancel()
            raise
        if seconds:
            self._seconds_per_row = seconds / len(rows)
            self._slowest_row = max(slowest, self._slowest_row / 2)
        return scores

    def close(self) -> None:
        """End the processes, also those in the middle of a row; takes little more than `CLOSE_SECONDS` at most."""
        children = set(self._children())
        self._pool.stop()
        # The pool's own limit does not hold once it is stopped, and its threads can be stuck in a full pipe.
        joining = threading.Thread(target=self._pool.join, name="reward-pool-close", daemon=True)
        joining.start()
        joining.join(CLOSE_SECONDS)
        if joining.is_alive():
            for child in children | set(self._children()):
                child.kill()
                child.join(1)

    def _children(self) -> list[Any]:
        return list(self._pool._pool_manager.worker_manager.workers.values())

    def _rows_per_chunk(self, rows: int) -> int:
        """As many rows as make a chunk worth sending, but no fewer chunks than processes; one while nothing is known.

        The mean decides what is worth sending, the slowest row what is safe: one slow row in a while is no reason to
        send cheap rows one by one.
        """
        if self._seconds_per_row is None:
            return 1
        worth = TARGET_CHUNK_SECONDS / max(self._seconds_per_row, 1e-9)
        safe = CHUNK_SHARE_OF_DEADLINE * self.timeout_seconds / max(self._slowest_row, 1e-9)
        return max(1, min(int(worth), int(safe), math.ceil(rows / self.processes)))

    def _schedule(self, rows: Sequence[Mapping[str, Any]]) -> concurrent.futures.Future[_Scored]:
        try:
            return self._pool.schedule(_score, args=(rows,), timeout=self.timeout_seconds)
        except RuntimeError as error:  # the pool has given up
            raise self._broken(error) from error

    def _failed(self, index: int, row: Mapping[str, Any], why: _NoScore) -> None:
        """Count a row without a score, or raise, as `on_error` says."""
        if self.on_error == "zero":
            self.failures += 1
            return
        text = (
            f"{self._named()}: sample {index} of the step {why.what}.\n"
            f"  prompt: {_short(row.get('prompt'))}\n  response: {_short(row.get('response'))}\n"
            "Set reward.on_error=zero to score such rows 0 and go on."
        )
        raise RewardError(f"{text}\n{why.trace}" if why.trace else text)

    def _ended_by(self, error: Exception) -> _NoScore:
        if isinstance(error, pebble.ProcessExpired):
            return _NoScore(f"took its process down (exit code {error.exitcode})")
        return _NoScore(f"did not return within {self.timeout_seconds:g} s and was killed (reward.timeout_seconds)")

    def _hanging(self, timeouts: int) -> RewardError:
        return RewardError(
            f"{self._named()}: the reward seems to hang on every row: {timeouts} calls one after another did not "
            f"return within {self.timeout_seconds:g} s. Call it by hand on a row, or raise reward.timeout_seconds."
        )

    def _broken(self, error: Exception) -> RewardError:
        if isinstance(error, _Unstartable):
            return RewardError(f"{self._named()}: it cannot be imported in a process of the pool: {error}")
        return RewardError(
            f"{self._named()}: the processes of the pool end before they score a row: {error}. Does importing the "
            "module exit or crash in a new process?"
        )

    def _named(self) -> str:
        return f"role reward, method {self.function}, node {os.uname().nodename}"


def _alone(spans: collections.abc.Iterable[range]) -> collections.deque[range]:
    """The same rows, each in a span of its own: it has the whole deadline to itself."""
    return collections.deque(range(index, index + 1) for span in spans for index in span)


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
