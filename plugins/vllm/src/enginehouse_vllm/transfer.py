"""vLLM's side of a weight update: a weight-transfer engine that runs in each of vLLM's worker processes.

It reads a version from memory that the parent process names (`weight_updates.py`), or from a directory. On a GPU vLLM's
own `ipc` and `nccl` engines would be quicker; this engine works wherever the two processes share a host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.read_back import ReadBack
from enginehouse.weights.reports import Reporter
from enginehouse.weights.staged_source import StagedSource
from enginehouse_vllm.quantized import QuantizedLayers
from enginehouse_vllm.reload_repairs import (
    Shared,
    abandon_reload,
    forget_packed_experts,
    loaded_modules,
    packed_parameters,
    repack_tied,
    shared_parameters,
    unloaded_parameters,
)

NAME = "enginehouse"
"""vLLM's name for this engine in its `weight_transfer_config`."""


def register() -> None:
    """Register the engine (entry point `vllm.general_plugins`). vLLM calls it in each process, maybe repeatedly."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, MemoryTransfer)


@dataclass
class MemoryInit(WeightTransferInitInfo):
    """Message that is sent once, before the first update; `reports` is the path of the `Reports`."""

    reports: str


@dataclass
class MemoryUpdate(WeightTransferUpdateInfo):
    """A version to load.

    Attributes:
        parameters: Name, dtype, shape, path of the memory, first byte there and checksum of each parameter.
        directory: Model directory whose safetensors files hold the version, if it is not in memory; else empty.
    """

    parameters: list[Any] = field(default_factory=list)
    directory: str = ""


class MemoryTransfer(WeightTransferEngine[MemoryInit, MemoryUpdate]):
    """Loads a version as vLLM loads a checkpoint, layer by layer, into the tensors its kernels read.

    No step raises: its outcome goes to the reports, so that every rank runs through vLLM's order (start, update,
    finish). A finish after a failed step leaves the model as the failure left it.
    """

    init_info_cls = MemoryInit
    update_info_cls = MemoryUpdate
    supports_draft_weight_update = False

    _source = StagedSource()
    _shared: Shared = ()
    _loaded: set[int] | None = None
    _quantized = QuantizedLayers()

    def init_transfer_engine(self, init_info: MemoryInit) -> None:
        self._reporter = Reporter(init_info.reports, self.parallel_config.rank)
        self._read_back = ReadBack()

    def start_weight_update(self) -> None:
        """Do nothing: the model does not change before a version has come."""

    def receive_weights(self, update_info: MemoryUpdate) -> None:
        self._reporter.run(lambda: self._load(update_info))

    def finish_weight_update(self) -> None:
        """Finalize the load, if there was one, and compare the model with the version."""
        self._reporter.run(self._finish)

    def shutdown(self) -> None:
        """Release the version."""
        self._source = StagedSource()

    def _load(self, update: MemoryUpdate) -> None:
        self._source = source = StagedSource(update.parameters, update.directory)
        self._shared = shared_parameters(self.model)
        self._quantized = QuantizedLayers()
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        try:
            with (
                source.checked(self.parallel_config.rank, self.parallel_config.world_size),
                self._read_back.watch(),
                self._quantized.watch(self.model),
            ):
                self.model.load_weights(self._read_back.follow(source))
            loaded = loaded_modules(self.model)
            missing = unloaded_parameters(self.model, self._shared, loaded)
            if missing:
                raise WeightSyncError(f"the sent weights do not fill {listed(missing)} of vllm's model", missing)
        except BaseException:
            abandon_reload(self.model, self.model_config)
            raise
        self._loaded = loaded

    def _finish(self) -> list[tuple[int, str]] | None:
        loaded, self._loaded = self._loaded, None
        shared, self._shared = self._shared, ()
        source, self._source = self._source, StagedSource()
        if loaded is None:
            return None
        try:
            with self._read_back.watch(), self._quantized.watch(self.model):
                finalize_layerwise_reload(self.model, self.model_config)
                repack_tied(shared, loaded)
        except BaseException:
            abandon_reload(self.model, self.model_config)
            raise
        read = None if source.directory else self._read_back.compare(self.model, source, packed_parameters(self.model))
        source.close()
        self._quantized.compare(self.model)
        return read
