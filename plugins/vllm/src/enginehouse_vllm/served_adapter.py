"""The adapter that a vLLM replica serves: its name in requests, and vLLM's arguments for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from enginehouse.weights.form import adapted_layers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm import AsyncLLMEngine
    from vllm.lora.request import LoRARequest

    from enginehouse.engines.options import LoraOptions

ADAPTER_ID = 1


def adapter_request() -> LoRARequest:
    """Return what a request names the adapter by. Nothing is ever read from the path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("enginehouse", ADAPTER_ID, "/no/file")


class AdaptedEngine:
    """vLLM's engine, for a server whose clients do not name the adapter."""

    def __init__(self, llm: AsyncLLMEngine):
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, *args: Any, lora_request: object = None, **options: Any) -> Any:
        """Generate with the served adapter."""
        return self._llm.generate(*args, lora_request=adapter_request(), **options)


def adapter_arguments(adapter: LoraOptions, matrices: Iterable[str]) -> dict[str, Any]:
    """Return vLLM's arguments for one adapter.

    Args:
        matrices: names of all matrices that the adapter may have. vLLM prepares the layers of those that
            `adapter.targets` chooses.
    """
    from vllm.config.lora import MaxLoRARanks

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank),
        "lora_target_modules": adapted_layers(adapter, matrices),
        "worker_extension_cls": "enginehouse_vllm.adapters.WorkerExtension",
    }


def adapter_settings(adapter: LoraOptions) -> dict[str, Any]:
    """Return the settings that vLLM reads from an `adapter_config.json`."""
    return {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": []}
