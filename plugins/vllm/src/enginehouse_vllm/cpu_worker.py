"""A worker of vLLM for CPUs that can sleep, which vLLM's own worker for CPUs cannot.

vLLM creates it by name (`worker_cls`), and has it sleep and wake as on a GPU.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from enginehouse.engines.storages import give_back_freed_memory, give_up
from enginehouse_vllm.reload_repairs import forget_packed_linears


class SleepingCPUWorker(CPUWorker):
    """Frees memory in place: tensors keep their addresses, and the system supplies new pages once they are written."""

    def sleep(self, level: int = 1) -> None:
        """Free weights and caches, whatever the level, because a CPU has no other memory to keep weights in."""
        self.discard(("weights", "kv_cache"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Do nothing."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of the weights, of the caches or of both. Their contents are lost.

        Args:
            tags: `"weights"`, `"kv_cache"` or both.
        """
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
