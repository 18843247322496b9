"""Options of the `torch` engines. Light to import: the config checks them before torch is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from enginehouse.engines.memory import MemoryDemand, MemoryUse
from enginehouse.engines.model import Device, ModelSpec
from enginehouse.engines.options import GroupedTrainOptions, RolloutOptions
from enginehouse.errors import ConfigError
from enginehouse_torch.memory_plan import rollout_memory, train_memory


def _refuse_native(native: dict[str, Any]) -> dict[str, Any]:
    if native:
        raise ValueError("must be empty: the torch engines wrap no other engine that could take these options")
    return native


Native = Annotated[dict[str, Any], AfterValidator(_refuse_native)]


AttentionChoice = Literal[
    "auto", "sdpa", "flex_attention", "varlen_attention", "flash_attention_2", "flash_attention_3"
]
"""Names of attention functions in transformers, and `varlen_attention`, which is torch's own flash-attention."""

FLASH = {
    "flash_attention_2": ("flash-attn", "flash_attn"),
    "flash_attention_3": ("flash-attn-3", "flash_attn_interface"),
}
"""The package and the module of each version of flash-attention."""


class PackingOptions(GroupedTrainOptions):
    """Options of training engines that use `enginehouse_torch.modeling.token_model`."""

    share_prompts: Literal["auto", "never"] = Field(
        "auto",
        description="Treatment of rows that begin with the same prompt. auto: they compute it once, if that costs "
        "less; never: each row computes it.",
    )
    attention: AttentionChoice = Field(
        "auto",
        description="Attention kernel. sdpa: pads rows, and masks shared prompts; flex_attention: pads rows, without "
        "masks; flash_attention_2, flash_attention_3 and varlen_attention (torch's own): neither pad nor mask. auto: "
        "an installed one on cuda, sdpa on a CPU.",
    )

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check that transformers has a class for the model, and that this class can read the model's files."""
        from enginehouse_torch.modeling.examining import examine

        return examine(model)

    def check_device(self, device: Device, dtype: str) -> None:
        """Check that the requested attention kernels are installed and support device and dtype."""
        option = f"attention={self.attention}"
        if self.attention in ("auto", "sdpa"):
            return
        if device != "cuda":
            raise ConfigError(f"{option} has kernels only for cuda, but this run is on {device}; use attention=auto")
        if self.attention != "flex_attention" and dtype == "float32":
            raise ConfigError(
                f"{option} has no kernels for float32; use model.dtype=bfloat16, or attention=flex_attention"
            )
        if self.attention in FLASH:
            package, module = FLASH[self.attention]
            if importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"{option} needs {package}, which is not installed here; install it, or use attention=auto, which "
                    "uses what is installed where the engine runs"
                )


class TorchTrainOptions(PackingOptions):
    """Options of the `torch` training engine."""

    native: Native = Field(default_factory=dict, description="Must be empty, because the engine wraps no other")

    def memory(self, demand: MemoryDemand) -> MemoryUse:
        """Estimate the memory of a rank."""
        return train_memory(self, demand)


class TorchRolloutOptions(RolloutOptions):
    """Options of the `torch` rollout engine."""

    native: Native = Field(default_factory=dict, description="Must be empty, because the engine wraps no other")

    fused: bool = Field(
        True,
        description="Use the faster forward pass if the model's architecture is known and a check finds it correct",
    )
    prefill_tokens: int = Field(
        16384, gt=0, description="Maximum number of tokens, padding included, in a forward pass over prompts"
    )

    def check_files(self, model: ModelSpec) -> Sequence[str]:
        """Check the model as the training engine does, and that its state consists only of keys and values."""
        from enginehouse_torch.modeling.examining import examine_for_sampling

        return examine_for_sampling(model)

    def memory(self, demand: MemoryDemand) -> MemoryUse:
        """Estimate the memory of a replica."""
        return rollout_memory(self, demand)
