"""A rollout replica's end of a verified weight update, whatever its engine and the transport are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from enginehouse.engines.rollout import GenerateResult, PauseMode, RolloutEngine
from enginehouse.engines.weights import (
    ArrivedSums,
    TransferPlan,
    TransportSession,
    WeightChunk,
    WeightState,
    WeightSyncError,
    WeightUpdate,
    WeightUpdateAborted,
)
from enginehouse.weights.checksums import checksum, verify_state

log = logging.getLogger(__name__)

T = TypeVar("T")


class WeightReceiver:
    """Takes weights from a transport into an engine, and stands by the old ones until the new are wanted.

    All methods run on the engine's event loop; a transport's waits run in `thread`.

    Args:
        engine: a launched rollout engine.
        where: names the replica in messages.
        thread: one thread, so that a session is always used by the same.

    Attributes:
        serving: set while requests may be answered. Clear during an update: from the pause to the end of the
            verification, also where the engine itself has already been resumed to be verified.
        version: the last that was verified.

    An engine that is paused scores nothing, so it is resumed before it was verified, and goes on with what waits inside
    it. What it draws meanwhile is kept back (`unverified`).
    """

    def __init__(self, engine: RolloutEngine, where: str, thread: ThreadPoolExecutor):
        self._engine = engine
        self._where = where
        self._thread = thread
        self._plan: TransferPlan | None = None
        self._session: TransportSession | None = None
        self._busy = asyncio.Lock()  # one step of an update at a time
        self._staged: WeightState | None = None  # received and not yet committed, with the checksums at arrival
        self._committed: int | None = None  # version committed and not yet verified
        self._unverified: set[int] = set()  # versions committed and not, or never, verified
        self._aborted = -1
        self.version = 0
        self.serving = asyncio.Event()
        self.serving.set()

    def connect(self, plan: TransferPlan, session: TransportSession) -> None:
        """Use `session` for the updates to come; one that was aborted may come again by it."""
        self.close()
        self._aborted = -1
        self._plan, self._session = plan, session

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session, self._plan = self._session, None, None
        if session is not None:
            session.close()

    async def receive(self, version: int, deadline_seconds: float, pause: PauseMode) -> ArrivedSums:
        """Pause the engine and stage `version`; returns the checksums of what arrived.

        Raises:
            WeightSyncError: it did not arrive whole. The engine has resumed the version it had.
        """
        async with self._busy:
            plan, session = self._plan, self._session
            if plan is None or session is None:
                raise WeightSyncError(f"{self._where} was sent weights before a transport was connected")
            if version <= self._aborted:
                raise WeightUpdateAborted(f"{self._where}: weight update {version} was aborted")
            self.serving.clear()
            chunks = session.recv(version, deadline_seconds)
            try:
                return await asyncio.wait_for(self._take(chunks, version, plan, pause), deadline_seconds)
            except BaseException as error:
                session.abort(version)
                await self._on_thread(getattr(chunks, "close", lambda: None))
                await self._give_up()
                if isinstance(error, asyncio.TimeoutError):
                    raise WeightSyncError(
                        f"{self._where} did not pause and take weight update {version} within {deadline_seconds:g} s"
                    ) from error
                raise

    async def _take(
        self, chunks: Iterator[WeightChunk], version: int, plan: TransferPlan, pause: PauseMode
    ) -> ArrivedSums:
        await self._engine.pause(pause)
        await self._engine.start_weight_update(WeightUpdate(version, plan.parameters))
        sums: dict[str, str] = {}
        sent: dict[str, str] = {}  # under the names by which it left

        def take() -> WeightChunk | None:
            chunk = next(chunks, None)
            if chunk is None:
                return None
            arrived = {name: checksum(tensor) for name, tensor in chunk.tensors}
            sums.update(arrived)
            for name, whole in arrived.items():
                parts = chunk.parts.get(name)
                sent.update({name: whole} if parts is None else {part: checksum(view) for part, view in parts})
            return replace(chunk, checksums=arrived)

        while (chunk := await self._on_thread(take)) is not None:
            await self._engine.update_weights(chunk)
        self._staged = WeightState(version, sums)
        return ArrivedSums(parameters=sums, sent=sent)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def commit(self, version: int) -> WeightState:
        """Let the engine serve what was staged, and return what it says it serves.

        The engine resumes, so that it can be verified; `serving` stays clear until `serve`.

        Raises:
            WeightSyncError: another version, or none, was received; the engine refused, and still has the old
                version; or it does not serve what arrived (it then stays paused).
        """
        async with self._busy:
            staged = self._staged
            if staged is None or version != staged.version:
                there = "nothing" if staged is None else f"version {staged.version}"
                raise WeightSyncError(f"{self._where} was told to serve version {version}, but {there} is staged")
            self._unverified.add(version)
            await self._engine.finish_weight_update(version)
            self._staged, self._committed = None, version
            state = await self._engine.weight_state()
            verify_state(state, version, staged.checksums, self._where)
            await self._engine.resume()
            return state

    def serve(self, version: int) -> None:
        """Answer requests with `version`, which was committed.

        Raises:
            WeightSyncError: it was not, or is served already.
        """
        if version != self._committed:
            raise WeightSyncError(f"{self._where} has not committed version {version}")
        self._committed, self.version = None, version
        self._unverified.discard(version)
        self.serving.set()

    async def unverified(self, results: Sequence[GenerateResult]) -> list[int]:
        """Which of some results are not to be handed out: they hold tokens of weights that were not verified.

        Waits while those weights may still be: until requests are answered again.
        """
        if self._drawn_unverified(results):
            await self.serving.wait()
        return self._drawn_unverified(results)

    def _drawn_unverified(self, results: Sequence[GenerateResult]) -> list[int]:
        if not self._unverified:
            return []
        return [
            number
            for number, result in enumerate(results)
            if any(
                one.first_version <= version <= one.last_version
                for one in result.completions
                for version in self._unverified
            )
        ]

    async def abort(self, version: int) -> None:
        """Give up the update to `version`, also while it is being received or before it came.

        The old version is served again. If the new one is committed there is no way back: `serving` stays clear, so
        that nothing is drawn from weights that were not verified.
        """
        self._aborted = max(self._aborted, version)
        if self._session is not None:
            self._session.abort(version)
        async with self._busy:
            if self._staged is not None and (self._staged.version or 0) <= version:
                await self._give_up()

    async def _give_up(self) -> None:
        """Go back to the version that is served. An engine that cannot even do that is logged, not raised: what went
        wrong before it says more."""
        self._staged = None
        try:
            await self._engine.abort_weight_update()
            await self._engine.resume()
        except Exception:
            log.exception("%s could not go back to the weights it had", self._where)
        if self._committed is None:  # else what it has was never verified, by an update before this one
            self.serving.set()
