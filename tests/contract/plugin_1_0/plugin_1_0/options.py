"""What a user may set of the engines."""

from __future__ import annotations

from pydantic import Field

from enginehouse.engines.options import RolloutOptions, TrainOptions


class TrainingOptions(TrainOptions):
    """Options of the training engine."""

    foreach: bool = Field(True, description="Update many parameters in one call")


class SamplingOptions(RolloutOptions):
    """Options of the rollout engine."""
