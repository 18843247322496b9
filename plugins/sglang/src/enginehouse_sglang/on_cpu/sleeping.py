"""Frees memory on a CPU when SGLang is told to, through its interface for plugins.

SGLang frees memory by torch-memory-saver, which is for GPUs. On a CPU it only records that memory is to be freed.
"""

from __future__ import annotations

from typing import Any

RELEASE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
"""Method that calls `memory_saver_adapter.pause`, which does nothing on a CPU (weight_updater.py:365, 374)."""

CACHES = ("k_buffer", "v_buffer", "kv_buffer")
"""Attributes of pools that hold the tensors of keys and values."""


def free_released_memory() -> None:
    """Free released memory in place: its pages come back when they are written to."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RELEASE, _free, HookType.AFTER)


def _free(answer: Any, updater: Any, request: Any) -> Any:
    from enginehouse.engines.storages import give_back_freed_memory, give_up

    runner = updater.tp_worker.model_runner
    tensors = list(runner.model.parameters()) if "weights" in request.tags else []
    if "kv_cache" in request.tags:
        tensors += [cache for name in CACHES for cache in getattr(runner.token_to_kv_pool, name, None) or ()]
    for tensor in tensors:
        give_up(tensor.untyped_storage())
    give_back_freed_memory()
    return answer
