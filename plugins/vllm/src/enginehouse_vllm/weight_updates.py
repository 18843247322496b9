"""Stages a new weight version in this host's memory, and has vLLM load all of it or nothing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.weights.reports import Reports
from enginehouse.weights.staging import StagedWeights, Version
from enginehouse_vllm.served_adapter import adapter_settings

if TYPE_CHECKING:
    from vllm import AsyncLLMEngine


class VLLMWeights(StagedWeights):
    """Keeps two versions in this host's memory: the staged version and the served version.

    vLLM loads a version from this memory, except version 0, which it loads from the model's directory.

    Attributes:
        keeps_cache: True if running requests keep their keys and values at the next switch. Later requests do not find
            these, because they name another version as their `cache_salt`.
    """

    def __init__(self, spec: ModelSpec, where: str):
        super().__init__(spec, where)
        self.keeps_cache = False
        self._reports: Reports | None = None

    async def commit(self, llm: AsyncLLMEngine, version: int) -> None:
        """Have vLLM load what was staged, and serve it as `version`; see `serve`."""
        if self.adapter is None:
            await self.serve(version, partial(self._load, llm), partial(self._start, llm))
        else:
            await self.serve(version, partial(self._load_adapter, llm))

    async def _load_adapter(self, llm: AsyncLLMEngine, version: int, staged: Version | None) -> None:
        """Load an adapter; without one, remove the adapter."""
        assert self.adapter is not None
        if staged is None:
            await self.clear_adapter(llm)
        else:
            parameters = staged.source()["parameters"]
            staged.note_read(await self._step_adapter(llm, "load", parameters, adapter_settings(self.adapter)))
        await self._begin_version(llm, version)

    async def clear_adapter(self, llm: AsyncLLMEngine) -> None:
        """Have vLLM serve an adapter that changes nothing. Call it before the first request."""
        await self._step_adapter(llm, "clear")

    async def _step_adapter(self, llm: AsyncLLMEngine, step: str, *arguments: Any) -> list[Any]:
        """Have each of vLLM's processes load or clear the adapter, and return what it reports."""
        if self._reports is None:
            self._reports = Reports(llm.vllm_config.parallel_config.world_size, "vllm")
        doing = f"{step} the adapter"
        sent = (self._reports.path, *arguments)
        self._reports.clear()
        await self._ask(llm.collective_rpc(f"enginehouse_{step}_adapter", args=sent), doing)
        return self._reports.check(self._where, doing)

    async def _start(self, llm: AsyncLLMEngine) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._reports is None:
            reports = Reports(llm.vllm_config.parallel_config.world_size, "vllm")
            request = WeightTransferInitRequest({"reports": reports.path})
            await self._ask(llm.init_weight_transfer_engine(request), "prepare for weight updates")
            self._reports = reports
        await self._ask(llm.start_weight_update(), "begin the update")

    async def _load(self, llm: AsyncLLMEngine, version: int, staged: Version | None) -> None:
        """Load a version, and note what was read back of it; without one, load the model's directory."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        doing = "load the new weights"
        try:
            self._board.clear()
            await self._ask(llm.update_weights(WeightTransferUpdateRequest(self.source_of(staged))), doing)
            self._board.check(self._where, doing)
        finally:
            self._board.clear()
            await self._ask(llm.finish_weight_update(), doing)
        reports = self._board.check(self._where, doing)
        if staged is not None:
            staged.note_read(reports)
        await self._begin_version(llm, version)

    async def _begin_version(self, llm: AsyncLLMEngine, version: int) -> None:
        """Give vLLM the version's number, and drop everything that was computed from older weights, unless it is
        kept."""
        await self._ask(llm.update_weight_version(str(version)), "take the new version's number")
        if self.keeps_cache:
            return
        # Frozen requests are recomputed from the new weights, else their keys and values would stay.
        reset = await self._ask(llm.reset_prefix_cache(reset_running_requests=True), "reset its prefix cache")
        if not reset:
            raise WeightSyncError(f"{self._where}: vllm did not reset its prefix cache, which is of older weights")

    async def _ask(self, call: Any, doing: str) -> Any:
        """Return vLLM's answer; raises `WeightSyncError` if it fails, and vLLM's `EngineDeadError` if it has died."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            raise
        except Exception as error:
            raise WeightSyncError(f"{self._where}: vllm could not {doing}: {error}") from error

    @property
    def _board(self) -> Reports:
        assert self._reports is not None
        return self._reports

    async def state(self, llm: AsyncLLMEngine) -> WeightState:
        """Return the version that vLLM says it serves, or None if the weights are lost.

        Checksums are of the parameters that vLLM's processes found in their model after the load; vLLM has packed or
        calculated the others.
        """
        async with self.switching:
            return WeightState(None) if self.is_lost else self.state_of(int(await llm.get_weight_version()))
