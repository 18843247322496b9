"""vLLM's end of a weight update: a weight-transfer engine that runs in each of vLLM's worker processes.

It takes a version from memory that the process above it names (`weights.py`), or from a directory. On a GPU vLLM's own
`ipc` and `nccl` engines would be the quicker way; this one works wherever the two processes share a host.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from enginehouse.engines.host_memory import private_copy
from enginehouse.engines.weights import WeightSyncError, checksum
from enginehouse_vllm.reload_repairs import (
    Shared,
    abandon_reload,
    forget_packed_experts,
    loaded_modules,
    repack_tied,
    shared_parameters,
    unloaded_parameters,
)
from enginehouse_vllm.reports import Reporter

NAME = "enginehouse"
"""What vLLM knows this engine by, in its `weight_transfer_config`."""


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes, in some of them more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, MemoryTransfer)


@dataclass
class MemoryInit(WeightTransferInitInfo):
    """Once, before the first update.

    Attributes:
        reports: path of the `Reports`.
    """

    reports: str


@dataclass
class MemoryUpdate(WeightTransferUpdateInfo):
    """A step of an update.

    Attributes:
        step: `"check"`: see that a version is there, whole, and touch nothing; `"load"`: load it.
        parameters: its parameters: name, dtype, shape, path of the memory that holds it, first byte there, checksum.
        directory: instead of them, a model directory with safetensors.
    """

    step: Literal["check", "load"]
    parameters: list[Any] = field(default_factory=list)
    directory: str = ""


class MemoryTransfer(WeightTransferEngine[MemoryInit, MemoryUpdate]):
    """Loads a version as vLLM loads a checkpoint, layer by layer, into the tensors its kernels read.

    No step raises: what came of it stands in the reports. vLLM's own order (start, update, finish) is then always
    kept, on every rank; a finish after a step that failed leaves the model as the failure left it.
    """

    init_info_cls = MemoryInit
    update_info_cls = MemoryUpdate
    supports_draft_weight_update = False

    _memories: Sequence[mmap] = ()
    _weights: Any = ()
    _shared: Shared = ()
    _loaded: set[int] | None = None

    def init_transfer_engine(self, init_info: MemoryInit) -> None:
        """See vLLM's base class."""
        self._reporter = Reporter(init_info.reports, self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Nothing: the model is not touched before a version was checked."""

    def receive_weights(self, update_info: MemoryUpdate) -> None:
        """One step."""
        self._reporter.of(lambda: self._load() if update_info.step == "load" else self._check(update_info))

    def finish_weight_update(self) -> None:
        """Finalize what was loaded, if it was."""
        self._reporter.of(self._finish)

    def shutdown(self) -> None:
        """Let go of the version."""
        self._weights, self._memories = (), ()

    def _check(self, update: MemoryUpdate) -> None:
        if update.directory:
            self._weights = _in_directory(update.directory)
            return
        memories = {path: private_copy(path) for path in {parameter[3] for parameter in update.parameters}}
        self._memories = list(memories.values())
        self._weights = [
            (name, _view(memories[path], dtype, shape, begin))
            for name, dtype, shape, path, begin, _ in update.parameters
        ]
        wrong = [
            name
            for (name, tensor), (*_, expected) in zip(self._weights, update.parameters, strict=True)
            if checksum(tensor) != expected
        ]
        if wrong:
            raise WeightSyncError(f"{', '.join(wrong[:5])} did not reach it as it was staged", wrong)

    def _load(self) -> None:
        self._shared = shared_parameters(self.model)
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(self._weights))
            loaded = loaded_modules(self.model)
            missing = unloaded_parameters(self.model, self._shared, loaded)
            if missing:
                raise WeightSyncError(f"nothing that was sent fills {', '.join(missing[:5])} of vllm's model", missing)
        except BaseException:
            abandon_reload(self.model, self.model_config)
            raise
        self._loaded = loaded

    def _finish(self) -> None:
        loaded, self._loaded = self._loaded, None
        shared, self._shared = self._shared, ()
        try:
            if loaded is not None:
                finalize_layerwise_reload(self.model, self.model_config)
                repack_tied(shared, loaded)
        except BaseException:
            abandon_reload(self.model, self.model_config)
            raise
        finally:
            self._weights = ()
            memories, self._memories = self._memories, ()
        if loaded is not None:
            for memory in memories:
                _release(memory)


def _view(memory: mmap, dtype: str, shape: list[int], begin: int) -> torch.Tensor:
    """A tensor that views memory from its byte `begin` on."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=begin).view(shape)


def _in_directory(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model directory; its files are opened as they are asked for."""
    from safetensors import safe_open

    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                yield name, tensors.get_tensor(name)


def _release(memory: mmap) -> None:
    """Unmap a version.

    Raises:
        WeightSyncError: vLLM kept tensors that view it, which a later version would overwrite.
    """
    try:
        memory.close()
    except BufferError:
        gc.collect()
        try:
            memory.close()
        except BufferError:
            raise WeightSyncError("it reads weights from memory that belongs to the update, not to itself") from None
