"""The adapter that an SGLang replica serves: its name in requests, and SGLang's arguments for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ConfigError, listed

if TYPE_CHECKING:
    from enginehouse.engines.options import LoraOptions

ADAPTER = "enginehouse"
"""SGLang's name for the adapter."""

ADAPTABLE = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
})  # fmt: skip
"""Last parts of the names of layers to which SGLang can add an adapter, and which split as its others do."""


def check_layers(layers: Iterable[str]) -> None:
    """Check that SGLang can add an adapter to layers with these last parts of their names. Raises `ConfigError` if it
    cannot."""
    if others := sorted(set(layers) - ADAPTABLE):
        raise ConfigError(f"sglang adds no adapter to {listed(others)} (lora.targets)")


def adapter_arguments(adapter: LoraOptions, layers: Collection[str], device: str) -> dict[str, Any]:
    """Return SGLang's arguments for one adapter of some layers."""
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": adapter.rank,
        "lora_target_modules": list(layers),
        "max_loras_per_batch": 2,  # this one, and none: both keep their places
    }
    return arguments | ({"lora_backend": "torch_native"} if device == "cpu" else {})


def adapter_settings(adapter: LoraOptions, layers: Collection[str]) -> dict[str, Any]:
    """Return the settings that SGLang reads from an `adapter_config.json`."""
    return {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": list(layers)}
