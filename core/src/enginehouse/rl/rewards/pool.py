"""Reward functions, run in a pool of processes with a deadline for each response.

A reward is somebody's own code: it may hang, crash or exit. It runs where that costs a row and not the run.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pebble

from enginehouse.errors import EnginehouseError
from enginehouse.plugin.records import resolve

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan

TARGET_CHUNK_SECONDS = 0.05
"""Cheap rewards are sent in chunks of about this long, so that a call's overhead is paid once a chunk."""


class RewardError(EnginehouseError):
    """A reward that raised, returned something else than a number, ran out of time, or took its process down."""


_function: Any = None
_arguments: dict[str, Any] = {}


def _start(reference: str, arguments: Mapping[str, Any], python_path: Sequence[str]) -> None:
    """Set a pool process up: resolve the function once."""
    global _function, _arguments
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [path for path in python_path if path not in sys.path]
    _function = resolve(reference)
    _arguments = dict(arguments)


def _score(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    scores = []
    for row in rows:
        score = _function(**row, **_arguments)
        if not isinstance(score, int | float):
            raise TypeError(f"the reward returned {score!r} ({type(score).__name__}) instead of a number")
        scores.append(float(score))
    return scores


class RewardPool:
    """Scores rows with one function in `processes` processes.

    Args:
        function: `"module:function"`, called with keywords only: `prompt`, `response`, `finish_reason`, the data set's
            other columns, and `arguments`.
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

        Raises:
            RewardError: a row has no score and `on_error` is `"fail"`; names the row, shows the function's traceback.
        """
        started = time.perf_counter()
        chunk = self._rows_per_chunk(len(rows))
        spans = [(start, rows[start : start + chunk]) for start in range(0, len(rows), chunk)]
        futures = [self._pool.schedule(_score, args=(part,), timeout=self.timeout_seconds) for _, part in spans]
        scores: list[float] = []
        try:
            for (start, part), future in zip(spans, futures, strict=True):
                scores += self._collect(start, part, future)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        if rows:
            self._seconds_per_row = (time.perf_counter() - started) * min(self.processes, len(spans)) / len(rows)
        return scores

    def close(self) -> None:
        """End the processes, also those in the middle of a row."""
        self._pool.stop()
        self._pool.join(timeout=5)

    def _rows_per_chunk(self, rows: int) -> int:
        """As many rows as make a chunk worth sending, but no fewer chunks than processes."""
        if self._seconds_per_row is None:
            return 1 if rows <= self.processes else math.ceil(rows / (4 * self.processes))
        fitting = int(TARGET_CHUNK_SECONDS / max(self._seconds_per_row, 1e-9))
        return max(1, min(fitting, math.ceil(rows / self.processes)))

    def _collect(self, start: int, rows: Sequence[Mapping[str, Any]], future: pebble.ProcessFuture) -> list[float]:
        try:
            return future.result()
        except Exception as error:
            if len(rows) > 1:  # find the row: each has the whole deadline to itself
                alone = [self._pool.schedule(_score, args=([row],), timeout=self.timeout_seconds) for row in rows]
                return [
                    score
                    for offset, (row, one) in enumerate(zip(rows, alone, strict=True))
                    for score in self._collect(start + offset, [row], one)
                ]
            if self.on_error == "zero":
                self.failures += 1
                return [0.0]
            raise RewardError(self._explain(start, rows[0], error)) from error

    def _explain(self, index: int, row: Mapping[str, Any], error: Exception) -> str:
        if isinstance(error, concurrent.futures.TimeoutError):
            what = f"did not return within {self.timeout_seconds:g} s and was killed (reward.timeout_seconds)"
        elif isinstance(error, pebble.ProcessExpired):
            what = f"took its process down (exit code {error.exitcode})"
        else:
            what = f"raised {type(error).__name__}: {error}"
        text = (
            f"role reward, method {self.function}, node {os.uname().nodename}: sample {index} of the step {what}.\n"
            f"  prompt: {_short(row.get('prompt'))}\n  response: {_short(row.get('response'))}\n"
            "Set reward.on_error=zero to score such rows 0 and go on."
        )
        trace = getattr(error, "traceback", None)
        return f"{text}\n{trace}" if trace else text


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
