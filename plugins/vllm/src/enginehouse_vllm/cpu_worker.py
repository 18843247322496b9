"""A worker of vLLM for CPUs that can sleep, which vLLM's own worker for CPUs cannot.

vLLM creates it by name (`worker_cls`), and has it sleep and wake as on a GPU.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from enginehouse.engines.storages import give_back_freed_memory, give_up
from enginehouse_vllm.reload_repairs import forget_packed_linears


class SleepingCPUWorker(CPUWorker):
    """Gives up memory in place: tensors keep their addresses, and pages come back when they are written to."""

    def sleep(self, level: int = 1) -> None:
        """Give up weights and caches at every level, because a CPU has no other memory to keep weights in."""
        self.discard(("weights", "kv_cache"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give up the memory of weights, caches or both."""
        tensors = []
        if "kv_cache" in tags:
            for cache in self.model_runner.kv_caches:
                tensors += cache if isinstance(cache, (list, tuple)) else [cache]
        if "weights" in tags:
            model = self.model_runner.get_model()
            tensors += list(model.parameters())
            forget_packed_linears(model)
        for tensor in tensors:
            give_up(tensor.untyped_storage())
        give_back_freed_memory()
