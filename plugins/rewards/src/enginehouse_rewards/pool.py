"""Runs reward functions in a pool of processes, with a time limit for each response.

A reward is the user's own code, which may hang, crash or exit. In a separate process, that costs a row and not the run.
A thread of the pool hands out rows and collects scores. Only this thread touches processes and batches.
"""

from __future__ import annotations

import collections
import os
import selectors
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from enginehouse.controller.ray_access import ray_access
from enginehouse_rewards.batch import FailurePolicy, OnError, RewardError, RowGroup, ScoringBatch
from enginehouse_rewards.process import RewardProcess
from enginehouse_rewards.processes import RewardProcesses
from enginehouse_rewards.program import RowScore, SetUp

__all__ = ["RewardError", "RewardPool", "ScoringBatch"]

LOOK_SECONDS = 0.1
"""Interval at which silent processes are checked."""

WAKE_BYTES = 4096
"""Maximum number of wake-up calls that are read at once."""


class RewardPool:
    """Scores rows with one function in `processes` processes.

    Args:
        function: `"module:function"`. The function gets, by name, those values of the row that it has parameters for,
            and `arguments`. docs/rewards.md describes what it may return.
        arguments: further keyword arguments of every call.
        name: name of the reward in messages, if it is one of several.
        processes: number of processes.
        timeout_seconds: time limit for one row, or for one call of a batched reward; then the process is killed.
        concurrency: number of rows that a process of an `async` reward scores at the same time.
        on_error: `"fail"` raises an error for a row without a score; `"zero"` scores it 0; `"leave_out"` scores it 0
            too, and the caller leaves it out.
        max_failures: largest fraction of a batch's rows that may have no score. If more rows have none, and they are at
            least `LEAST_FAILURES`, the reward counts as broken: the batch raises an error whatever `on_error` says. If
            the fraction is 0, a single row is enough.
        python_path: directories from which the function is imported.
        record: file for the first failure that does not end the run.
        may_abstain: accept None from the function, because another reward scores the row.
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
        self._label = f"role reward{name and ' '}{name}, method {function}, node {os.uname().nodename}"
        self._policy = FailurePolicy(self._label, timeout_seconds, on_error, max_failures)
        setup = SetUp(function, dict(arguments or {}), list(python_path), timeout_seconds, concurrency, may_abstain)
        self._closed = False
        self._submitted: collections.deque[tuple[RowGroup, bool]] = collections.deque()
        self._lock = threading.Lock()  # so that a closed pool takes no rows
        self._waker, self._awake = socket.socketpair()
        self._waker.setblocking(False)
        self._batches: list[ScoringBatch] = []  # the batches with rows that a caller waits for, oldest first
        self._workers = RewardProcesses(setup, self._policy, processes, record)
        self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self._thread.start()

    def batch(self, expected_rows: int) -> ScoringBatch:
        """Return a batch to which rows are submitted as they come, from any thread. Several batches may be open at
        once.

        `expected_rows` is the number of rows to come; `max_failures` is a fraction of it.
        """
        return ScoringBatch(expected_rows, self._policy, self._put)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[RowScore]:
        """Score rows, in order, as a separate batch.

        Raises:
            RewardError: a row has no score and `on_error` is `"fail"`; the message names the row and shows the
                function's traceback and output. With any `on_error`: more rows have no score than `max_failures`
                allows, the function cannot be imported in a process of the pool, one row after another times out, or
                the pool was closed.
            ClusterLost: Ray's control service is gone.
        """
        future = self.batch(len(rows)).submit(rows)
        try:
            return future.result()
        finally:
            future.cancel()  # if the wait is interrupted

    def close(self) -> None:
        """End the processes and everything that they started, even if busy; takes little more than `CLOSE_SECONDS`."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join()

    # Called by any thread

    def _put(self, groups: Sequence[RowGroup], cancelled: bool) -> None:
        """Pass new or cancelled groups to the thread."""
        with self._lock:
            if not self._closed:
                self._submitted.extend((group, cancelled) for group in groups)
            elif not cancelled:
                for group in groups:
                    group.future.set_exception(self._make_closed_error())
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # the socket is full, so it wakes the thread anyway; or it is closed
            self._waker.send(b".")

    # Called by the pool's thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                try:
                    if self._batches or self._workers.sending:
                        self._turn()
                    else:
                        self._rest()
                except Exception as error:  # no single batch is to blame
                    self._end(list(self._batches), error)
        finally:
            with self._lock:
                self._closed = True
            self._take_submitted()
            self._end(list(self._batches), self._make_closed_error())
            self._workers.close()
            self._waker.close()
            self._awake.close()

    def _rest(self) -> None:
        """Wait for rows, then replace idle processes that have ended."""
        self._awake.recv(WAKE_BYTES)
        self._take_submitted()
        if self._batches:
            self._workers.check_idle()

    def _turn(self) -> None:
        """Hand out rows, and process the results that arrive within `LOOK_SECONDS`."""
        self._workers.start_missing()
        self._workers.hand_out(self._batches)
        for process in self._wait():
            self._workers.take_in(process)
        self._workers.check_busy()
        for batch in list(self._batches):
            if (error := batch.verdict()) is not None:
                self._end([batch], error)
            elif not batch.groups:
                self._batches.remove(batch)
        ray_access.look()  # nobody else tells those who wait for scores

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
        """End batches, and the processes whose rows nobody waits for any more."""
        for batch in batches:
            batch.end(error)
            self._batches.remove(batch)
        self._workers.end_unwanted()

    def _wait(self) -> list[RewardProcess]:
        """Wait at most `LOOK_SECONDS`, and return the processes that sent something or ended."""
        with selectors.PollSelector() as selector:  # cheaper to make than one of epoll
            selector.register(self._awake, selectors.EVENT_READ)
            for process in self._workers.processes:
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

    def _make_closed_error(self) -> RewardError:
        return RewardError(f"{self._label}: the pool was closed")
