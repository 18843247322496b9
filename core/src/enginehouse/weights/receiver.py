"""The replica's side of a verified weight update, for any engine and transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from enginehouse.engines.rollout import GenerateResult, PauseMode, RolloutEngine
from enginehouse.engines.weights import (
    ArrivedSums,
    CountingSession,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightState,
    WeightSyncError,
    WeightUpdate,
    WeightUpdateAborted,
)
from enginehouse.errors import first_line
from enginehouse.weights.checksums import checksums, mixed_checksum, verify_state

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Switched:
    """A replica's switch to another version.

    Attributes:
        state: the state that the engine reported afterwards.
        interrupted_tokens: `Health.running_tokens` at the switch; None if the engine does not know it, or the update
            waited for running requests.
    """

    state: WeightState
    interrupted_tokens: int | None


class WeightReceiver:
    """Moves weights from a transport into an engine, which serves the old weights until `commit`.

    All methods run on the engine's event loop, and a transport's waits run in `thread`. An engine that stages while it
    generates is paused only at `commit`; any other engine is paused from `receive` on. The verification scores prompts,
    which a paused engine cannot do, so the engine resumes first. Results of the requests that then continue are held
    back until the verification ends (`is_unverified`).

    Args:
        thread: executor with one thread, so that all calls of a session run in the same thread.
        stages_while_generating: True if the engine has the capability `stages_while_generating`.

    Attributes:
        serving: set while requests may be answered; clear from an update's pause to the end of its verification.
    """

    def __init__(
        self, engine: RolloutEngine, where: str, thread: ThreadPoolExecutor, stages_while_generating: bool = False
    ):
        self._engine = engine
        self._where = where
        self._thread = thread
        self._stages_while_generating = stages_while_generating
        self._pausing: tuple[PauseMode, float] = "wait", 0.0  # of the update: treatment of requests, time limit
        self._paused = False
        self._plan: TransferPlan | None = None
        self._session: TransportSession | None = None
        self._busy = asyncio.Lock()
        self._staged: WeightState | None = None  # received but not committed, with checksums at arrival
        self._committed: int | None = None  # committed but not yet verified version
        self._unverified: set[int] = set()  # committed versions that were not verified
        self._aborted = -1
        self.version = 0
        self.serving = asyncio.Event()
        self.serving.set()

    def connect(self, plan: TransferPlan, session: TransportSession) -> None:
        """Use `session` for further updates. The next update may have the version of an update that was aborted."""
        self.close()
        self._aborted = -1
        self._plan, self._session = plan, session

    def close(self) -> None:
        session, self._session, self._plan = self._session, None, None
        if session is not None:
            session.close()

    async def receive(self, version: int, deadline_seconds: float, pause: PauseMode) -> ArrivedSums:
        """Stage `version`, and return the checksums at arrival. An engine that cannot stage while it generates is
        paused first, and a loan needs a pause too, because the lent tensors are the new version already.

        Args:
            deadline_seconds: longest time without a further chunk, and time limit of a pause at `commit`.
            pause: treatment of running requests.

        Raises:
            WeightSyncError: the version did not arrive completely. The engine serves the old version again.
        """
        async with self._busy:
            plan, session = self._plan, self._session
            if plan is None or session is None:
                raise WeightSyncError(f"{self._where} was sent weights before a transport was connected")
            if version <= self._aborted:
                raise WeightUpdateAborted(f"{self._where}: weight update {version} was aborted")
            self._pausing = pause, deadline_seconds
            pauses = plan.lends or not self._stages_while_generating
            chunks = session.recv(version, deadline_seconds)
            try:
                async with asyncio.timeout(deadline_seconds) as limit:
                    return await self._take(chunks, version, plan, pauses, limit)
            except BaseException as error:
                session.abort(version)
                await self._on_thread(getattr(chunks, "close", lambda: None))
                await self._give_up()
                if isinstance(error, asyncio.TimeoutError):
                    done = "pause and take" if pauses else "take"
                    raise WeightSyncError(
                        f"{self._where} did not {done} weight update {version} within {deadline_seconds:g} s"
                    ) from error
                raise

    async def _take(
        self, chunks: Iterator[WeightChunk], version: int, plan: TransferPlan, pauses: bool, limit: asyncio.Timeout
    ) -> ArrivedSums:
        """Stage the chunks. Each of them restarts the `limit`, whose seconds are those of `receive`."""
        if pauses:
            await self._pause()
        await self._engine.start_weight_update(WeightUpdate(version, plan.parameters))
        sums: dict[str, str] = {}
        sent: dict[str, str] = {}  # by the senders' names

        def take() -> WeightChunk | None:
            chunk = next(chunks, None)
            if chunk is None:
                return None
            tensors = dict(chunk.tensors)
            parts = dict(part for name in tensors for part in chunk.parts.get(name, ()))
            arrived = _sum(tensors, chunk.checksums, plan)
            sums.update(arrived)
            sent.update({name: total for name, total in arrived.items() if name not in chunk.parts})
            sent.update(_sum(parts, chunk.checksums, plan))
            return replace(chunk, checksums=arrived)

        while (chunk := await self._on_thread(take)) is not None:
            await self._engine.update_weights(chunk)
            limit.reschedule(asyncio.get_running_loop().time() + self._pausing[1])
        self._staged = WeightState(version, sums)
        counted = self._session.bytes_arrived if isinstance(self._session, CountingSession) else None
        return ArrivedSums(parameters=sums, sent=sent, generating=not pauses, bytes_arrived=counted)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def commit(self, version: int) -> Switched:
        """Let the engine switch to the staged version.

        The engine is paused for the switch, and resumes for the verification. `serving` stays clear until `serve`.

        Raises:
            WeightSyncError: this version is not staged; the engine did not pause in time, or failed to switch, and
                still has the old version; or it does not serve the weights that arrived, and stays paused.
        """
        async with self._busy:
            staged = self._staged
            if staged is None or version != staged.version:
                present = "nothing" if staged is None else f"version {staged.version}"
                raise WeightSyncError(f"{self._where} was told to serve version {version}, but {present} is staged")
            if not self._paused:
                seconds = self._pausing[1]
                try:
                    await asyncio.wait_for(self._pause(), seconds)
                except TimeoutError as error:
                    raise WeightSyncError(
                        f"{self._where} did not pause for weight update {version} within {seconds:g} s"
                    ) from error
            interrupted = await self._count_interrupted()
            self._unverified.add(version)
            await self._engine.finish_weight_update(version)
            self._staged, self._committed = None, version
            state = await self._engine.weight_state()
            verify_state(state, version, staged.checksums, self._where)
            await self._resume()
            return Switched(state, interrupted)

    async def _count_interrupted(self) -> int | None:
        """Return `Switched.interrupted_tokens`. An error is only logged, because no update shall fail for a metric."""
        if self._pausing[0] not in ("keep", "keep_cache"):
            return None
        try:
            return (await self._engine.health()).running_tokens
        except Exception as error:
            log.warning("%s: the tokens of interrupted requests are not counted: %s", self._where, first_line(error))
            return None

    async def _pause(self) -> None:
        """Answer no further requests, and pause the engine."""
        self._paused = True
        self.serving.clear()
        await self._engine.pause(self._pausing[0])

    async def _resume(self) -> None:
        await self._engine.resume()
        self._paused = False

    def serve(self, version: int) -> None:
        """Answer requests with the committed `version`. Raises `WeightSyncError` if the version was not committed, or
        is served already."""
        if version != self._committed:
            raise WeightSyncError(f"{self._where} has not committed version {version}")
        self._committed, self.version = None, version
        self._unverified.discard(version)
        self.serving.set()

    async def is_unverified(self, result: GenerateResult) -> bool:
        """Return True if a result has tokens of unverified weights, so that it must not be returned. If those weights
        may still be verified, wait until requests are answered again."""
        if self._has_unverified(result):
            await self.serving.wait()
        return self._has_unverified(result)

    def _has_unverified(self, result: GenerateResult) -> bool:
        return any(
            completion.first_version <= version <= completion.last_version
            for completion in result.completions
            for version in self._unverified
        )

    async def abort(self, version: int) -> None:
        """Abort the update to `version`, before or while it is received, and serve the old version again. A commit
        cannot be undone. After a commit, `serving` stays clear, so that no result is from unverified weights."""
        self._aborted = max(self._aborted, version)
        if self._session is not None:
            self._session.abort(version)
        async with self._busy:
            if self._staged is not None and (self._staged.version or 0) <= version:
                await self._give_up()

    async def _give_up(self) -> None:
        """Return to the served version. If that fails, only log the error, because the earlier error says more."""
        self._staged = None
        try:
            await self._engine.abort_weight_update()
            if self._paused:
                await self._resume()
        except Exception:
            log.exception("%s could not return to its old weights", self._where)
        if self._committed is None:  # else an earlier update was never verified
            self.serving.set()


def _sum(tensors: Mapping[str, torch.Tensor], known: Mapping[str, str], plan: TransferPlan) -> dict[str, str]:
    """Return the checksum of each tensor that arrived, of the kind that the plan says, unless it is known."""
    unknown = {name: tensor for name, tensor in tensors.items() if name not in known}
    sums = map(mixed_checksum, unknown.values()) if plan.sums_in_place else checksums(list(unknown.values()))
    return {name: known[name] for name in tensors if name in known} | dict(zip(unknown, sums, strict=True))
