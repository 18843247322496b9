"""Lets a worker's engine answer requests, and returns only responses that verified weights generated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from enginehouse.controller.exchange import AnswerQueue
from enginehouse.engines.progress import note_progress
from enginehouse.engines.rollout import Completion, GenerateRequest, GenerateResult, RolloutEngine
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.generation import check_result
from enginehouse.weights.receiver import WeightReceiver


@dataclass(slots=True)
class _Request:
    """A request in progress.

    Attributes:
        waits: True while the request waits here for the verification of weights.
        aborted: True once the request must end.
    """

    task: asyncio.Task[GenerateResult]
    waits: bool = False
    aborted: bool = False


class VerifiedRequestQueue:
    """Sends requests to an engine. All methods run on the engine's event loop.

    Args:
        engine: a launched rollout engine.
        where: name of the engine and its worker in messages.
        seeds: True if the engine supports seeds; otherwise requests have none.
    """

    def __init__(self, engine: RolloutEngine, weights: WeightReceiver, where: str, *, seeds: bool = True):
        self._engine = engine
        self._weights = weights
        self._where = where
        self._seeds = seeds
        self._requests: dict[str, _Request] = {}
        self._answers = AnswerQueue[GenerateResult]()
        self._in_engine = 0
        self._idle, self._awake = asyncio.Event(), asyncio.Event()
        self._awake.set()

    def begin(self, request: GenerateRequest) -> asyncio.Task[GenerateResult]:
        """Start the task that answers a request. Requests of one turn of the loop reach the engine together, in their
        order. Raises `EnginehouseError` if a request with this id is in progress. The task itself raises it if the
        engine fails, or its result does not fit the request."""
        if request.id in self._requests:
            raise EnginehouseError(f"{self._where}: a request with the id {request.id!r} is in progress already")
        task = asyncio.get_running_loop().create_task(self._draw(request), name=request.id)
        self._requests[request.id] = _Request(task)
        return task

    async def _draw(self, request: GenerateRequest) -> GenerateResult:
        state = self._requests[request.id]
        try:
            while not state.aborted:
                state.waits = True
                while not (self._weights.serving.is_set() and self._awake.is_set()):
                    await self._weights.serving.wait()
                    await self._awake.wait()
                state.waits = False
                result = await self._generate(request)
                check_result(request, result, self._where)
                state.waits = True
                if not await self._weights.is_unverified(result):
                    return result
        except asyncio.CancelledError:
            if not state.aborted:
                raise
        finally:
            del self._requests[request.id]
        version = self._weights.version
        return GenerateResult(request.id, (Completion((), (), "abort", version, version),) * request.sampling.n)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        self._in_engine += 1
        if not self._seeds:
            request = replace(request, sampling=replace(request.sampling, seed=None))
        try:
            return await self._engine.generate(request)
        finally:
            self._in_engine -= 1
            note_progress()
            self._idle.set()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """Abort requests as `RolloutEngine.abort` does, also requests that the engine does not have yet."""
        for name in list(self._requests) if ids is None else ids:
            if (state := self._requests.get(name)) is not None:
                state.aborted = True
                if state.waits:
                    state.task.cancel()
        await self._engine.abort(ids)

    async def fall_asleep(self) -> None:
        """Hold requests back until `wake_up`, and return once the engine generates nothing."""
        self._awake.clear()
        while self._in_engine:
            self._idle.clear()
            await self._idle.wait()

    def wake_up(self) -> None:
        """Send requests to the engine again."""
        self._awake.set()

    async def exchange(
        self, requests: Sequence[GenerateRequest], aborted: Sequence[str] = ()
    ) -> list[asyncio.Task[GenerateResult]]:
        """Begin `requests`, abort the requests `aborted`, and return the tasks of requests that have ended since the
        last call; see `AnswerQueue`."""
        asking = self._answers.ask()
        for request in requests:
            self._answers.add(self.begin(request))
        if aborted:
            await self.abort(aborted)
        return await self._answers.ended(asking)
