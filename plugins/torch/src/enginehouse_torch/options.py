"""Options of the `torch` engines. Light to import: the config checks them before torch is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from enginehouse.engines.options import GroupedTrainOptions, RolloutOptions


def _none(native: dict[str, Any]) -> dict[str, Any]:
    if native:
        raise ValueError("the torch backends are no wrapper of another engine: there is nothing to pass these to")
    return native


Native = Annotated[dict[str, Any], AfterValidator(_none)]


class TorchTrainOptions(GroupedTrainOptions):
    """Options of the `torch` training engine."""

    native: Native = Field(default_factory=dict, description="Must be empty")

    share_prompts: Literal["auto", "never"] = Field(
        "auto", description="auto: rows that begin with the same prompt compute it once, where that costs less"
    )


class TorchRolloutOptions(RolloutOptions):
    """Options of the `torch` rollout engine."""

    native: Native = Field(default_factory=dict, description="Must be empty")

    fused: bool = Field(
        True, description="Use the faster forward pass where the model's shape is known and it proves right"
    )
    prefill_tokens: int = Field(16384, gt=0, description="Most padded prompt tokens in one forward pass")
