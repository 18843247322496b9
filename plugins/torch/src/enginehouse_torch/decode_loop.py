"""The decode thread. Only it touches the running batch and the weights; other threads post actions to it.

At each token boundary the thread runs the actions posted since the last one, in order, then admits waiting requests
while the batch has room, then computes one token for every completion.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from enginehouse.engines.progress import note_progress
from enginehouse.engines.rollout import PauseMode
from enginehouse.engines.weights import LoanOver
from enginehouse.errors import EnginehouseError
from enginehouse_torch.requests import RequestProgress
from enginehouse_torch.running_batch import RunningBatch
from enginehouse_torch.served_weights import ServedWeights

T = TypeVar("T")


class RolloutEngineFailed(EnginehouseError):
    """The decode loop has failed; the engine must be launched again."""


class DecodeLoop:
    """Runs a batch of at most `max_running` completions until it is stopped; `where` names this replica in messages.

    Attributes:
        at_boundary: called on the thread at each token boundary, before posted actions run; for tests and profilers.
        at_rest: called on the thread when the last completion has ended and no request waits.
    """

    def __init__(self, batch: RunningBatch, weights: ServedWeights, max_running: int, where: str):
        self._batch = batch
        self._weights = weights
        self._max_running = max_running
        self._where = where
        self._waiting: deque[RequestProgress] = deque()
        self._futures: dict[RequestProgress, asyncio.Future[Any]] = {}
        self._answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        self._pausing: list[asyncio.Future[Any]] = []
        self._paused = False
        self._draining = False
        self._keeps_cache = False  # at the next switch of weights
        self._cache_is_old = False  # and has to be computed again before the next token
        self._stopping = False
        self._actions: deque[Callable[[], None]] = deque()
        self._posted = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self.at_boundary: Callable[[], None] = lambda: None
        self.at_rest: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="enginehouse-decode", daemon=True)
        self._thread.start()

    # Called by other threads

    @property
    def running(self) -> int:
        """Number of completions being generated."""
        return len(self._batch)

    @property
    def running_tokens(self) -> int:
        """Number of tokens of these completions, each with its prompt."""
        return self._batch.tokens

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._paused

    def check(self) -> None:
        """Raise if the thread has failed or ended.

        Raises:
            RolloutEngineFailed: the thread has failed or ended. A failure is the cause of this error.
        """
        if self._failure is not None or self._closed:
            raise self._failure_error()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` at the next token boundary; actions run in the order they were posted.

        Raises:
            RolloutEngineFailed: the thread has ended.
        """
        with self._posted:
            if self._closed:
                raise self._failure_error()
            self._actions.append(action)
            self._posted.notify()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` at the next token boundary and return its result.

        Raises:
            RolloutEngineFailed: the loop failed before it ran the function.
        """
        self.check()
        future = asyncio.get_running_loop().create_future()

        def action() -> None:
            if self._failure is not None or self._closed:
                return self._answer(future, self._failure_error())
            try:
                self._answer(future, function())
            except Exception as error:
                self._answer(future, error)

        self.post(action)
        return await future

    def submit(self, requests: Sequence[tuple[RequestProgress, asyncio.Future[Any]]]) -> None:
        """Queue requests. Requests that are submitted together are admitted together."""

        def action() -> None:
            for pending, future in requests:
                self._futures[pending] = future
            self._waiting.extend(pending for pending, _ in requests)
            if self._failure is not None or self._closed:
                self._fail_requests()

        self.post(action)

    async def pause(self, mode: PauseMode) -> None:
        """Implement `RolloutEngine.pause`."""
        self.check()
        future = asyncio.get_running_loop().create_future()

        def action() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(self._batch.requests())
            self._draining = mode == "wait" and len(self._batch) > 0
            self._keeps_cache = mode == "keep_cache"
            self._pausing.append(future)

        self.post(action)
        await future

    async def resume(self) -> None:
        """Implement `RolloutEngine.resume`."""

        def unpause() -> None:
            self._paused = self._draining = False

        await self.call(unpause)

    async def switch(self, version: int) -> None:
        """Implement `RolloutEngine.finish_weight_update`."""

        def commit() -> None:
            self._weights.commit(version)
            self._cache_is_old |= not self._keeps_cache

        await self.call(commit)

    async def abort(self, ids: Sequence[str] | None) -> None:
        """Implement `RolloutEngine.abort`."""
        chosen = None if ids is None else set(ids)
        await self.call(lambda: self._abort([p for p in self._futures if chosen is None or p.request.id in chosen]))

    def forget(self, pending: RequestProgress) -> None:
        """Abort a request whose caller has been cancelled."""
        self.post(lambda: self._abort([pending]))

    def stop(self, deadline_seconds: float) -> None:
        """Stop the thread and abort running and waiting requests.

        Raises:
            EnginehouseError: the thread is still in a forward pass after the deadline.
        """

        def action() -> None:
            self._stopping = True

        if not self._closed:
            self.post(action)
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise EnginehouseError(
                f"the decode loop of {self._where} did not end within {deadline_seconds:.0f} seconds"
            )

    # Called by the decode thread

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                with self._posted:
                    self._posted.wait_for(lambda: self._actions or self._can_work())
                try:
                    if self._failure is None:
                        self.at_boundary()
                    while self._actions:
                        self._actions.popleft()()
                    if self._can_work() and not self._stopping:
                        self._work()
                        note_progress()
                except BaseException as error:  # whatever failed, waiting callers must get an error
                    self._failure = error
                    self._fail_requests()
                self._settle()
            self._abort(list(self._futures))
            self._settle()
            with self._posted:
                self._closed = True
            while self._actions:
                self._actions.popleft()()
            self._settle()

    def _can_work(self) -> bool:
        if self._failure is not None:
            return False
        if self._paused:
            return self._draining
        return bool(self._waiting) or len(self._batch) > 0

    def _work(self) -> None:
        """Admit requests and generate one token for every completion. Fail all requests if the weights' loan ended."""
        admissions = [] if self._paused else self._next_requests()
        try:
            with self._weights.using():
                if self._cache_is_old:
                    self._batch.recompute()
                    self._cache_is_old = False
                if len(self._batch) > 0:
                    self._batch.step(self._weights.version)
                if admissions:
                    self._batch.admit(admissions, self._weights.version)
        except LoanOver as error:
            self._fail_requests(error)
        self._draining = self._draining and len(self._batch) > 0
        if not self._waiting and not len(self._batch):
            self.at_rest()

    def _next_requests(self) -> list[tuple[RequestProgress, int]]:
        """Take requests from the queue, in order, while the batch has room; return `(request, samples to begin)`."""
        room = self._max_running - len(self._batch)
        admissions = []
        while self._waiting:
            pending = self._waiting[0]
            # All samples of a request begin together, because its prompt is prefilled once. A request with more
            # samples than the whole batch holds begins in parts.
            count = 0 if pending.request.sampling.max_tokens == 0 else min(pending.unadmitted, self._max_running)
            if count > room:
                break
            admissions.append((pending, count))
            room -= count
            if count < pending.unadmitted and count > 0:
                break
            self._waiting.popleft()
        return admissions

    def _abort(self, requests: Iterable[RequestProgress]) -> None:
        requests = list(requests)
        self._batch.abort(requests)
        for pending in requests:
            if not pending.finished:
                pending.complete_rest("abort", self._weights.version)
        aborted = set(requests)
        self._waiting = deque(pending for pending in self._waiting if pending not in aborted)

    def _settle(self) -> None:
        """Resolve the futures of finished requests and pauses, with one wake-up for each event loop."""
        for pending in [pending for pending in self._futures if pending.finished]:
            self._answer(self._futures.pop(pending), pending.result())
        if not self._draining or self._stopping or self._failure is not None:
            for future in self._pausing:
                self._answer(future, None if self._failure is None else self._failure_error())
            self._pausing = []
        answers, self._answers = self._answers, {}
        for loop, results in answers.items():
            try:
                loop.call_soon_threadsafe(_deliver, results)
            except RuntimeError:  # the event loop has been closed: nobody awaits these
                continue

    def _answer(self, future: asyncio.Future[Any], value: Any) -> None:
        self._answers.setdefault(future.get_loop(), []).append((future, value))

    def _fail_requests(self, error: Exception | None = None) -> None:
        for future in self._futures.values():
            self._answer(future, error or self._failure_error())
        self._futures.clear()
        self._waiting.clear()
        self._batch.clear()

    def _failure_error(self) -> RolloutEngineFailed:
        cause = self._failure
        if cause is None:
            return RolloutEngineFailed(f"the rollout engine of {self._where} has been shut down")
        error = RolloutEngineFailed(f"the decode loop of {self._where} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error


def _deliver(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Resolve futures, on their own event loop."""
    for future, value in results:
        if future.done():
            continue
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)
