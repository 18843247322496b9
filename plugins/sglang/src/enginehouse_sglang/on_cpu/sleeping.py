"""What frees memory on a CPU when SGLang is told to, through SGLang's interface for plugins.

SGLang frees memory by torch-memory-saver, which is for GPUs: on a CPU it only notes that it should.
"""

from __future__ import annotations

from typing import Any

RELEASE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""Where `memory_saver_adapter.pause` does nothing on a CPU (weight_updater.py:365, 374)."""

CACHES = ("k_buffer", "v_buffer", "kv_buffer")
"""What pools call the tensors that keys and values lie in."""


def make_free() -> None:
    """Free the memory of what is released, in place: pages come back as they are written to."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RELEASE, _free, HookType.AFTER)


def _free(answer: Any, updater: Any, request: Any) -> Any:
    from enginehouse.engines.storages import give_back_freed_memory, give_up

    runner = updater.tp_worker.model_runner
    tensors = list(runner.model.parameters()) if "weights" in request.tags else []
    if "kv_cache" in request.tags:
        tensors += [one for name in CACHES for one in getattr(runner.token_to_kv_pool, name, None) or ()]
    for tensor in tensors:
        give_up(tensor.untyped_storage())
    give_back_freed_memory()
    return answer
