"""Options of the built-in engines. Light to import: the config checks them before torch is imported."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from enginehouse.engines.options import RolloutOptions, TrainOptions


class TorchTrainOptions(TrainOptions):
    """Options of the `torch` training engine."""

    share_prompts: Literal["auto", "never"] = Field(
        "auto", description="auto: rows that begin with the same prompt compute it once, where that costs less"
    )


class TorchRolloutOptions(RolloutOptions):
    """Options of the `torch` rollout engine."""

    fused: bool = Field(
        True, description="Use the faster forward pass where the model's shape is known and it proves right"
    )
    prefill_tokens: int = Field(16384, gt=0, description="Most padded prompt tokens in one forward pass")
