"""All checks of training engines, in the order they are run and reported.

The simplest come first, since a later one often fails with it.
"""

from __future__ import annotations

from enginehouse_testing.check import Check
from enginehouse_testing.checks.train import (
    adapters,
    checkpoints,
    endings,
    experts,
    gradients,
    half_precision,
    offload,
    scores,
    training,
    value_head,
    weights,
)

CHECKS: tuple[Check, ...] = (
    *scores.CHECKS,
    *gradients.CHECKS,
    *training.CHECKS,
    *weights.CHECKS,
    *checkpoints.CHECKS,
    *endings.CHECKS,
    *experts.CHECKS,
    *value_head.CHECKS,
    *half_precision.CHECKS,
    *offload.CHECKS,
    *adapters.CHECKS,
)
