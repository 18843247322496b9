"""The checks of training engines. The simplest checks come first. If they fail, later checks often fail too."""

from __future__ import annotations

from enginehouse_testing.checks.train import (
    adapters,
    checkpoints,
    endings,
    experts,
    gradients,
    half_precision,
    offload,
    outgoing,
    scores,
    training,
    value_head,
)

CHECKS = (
    *scores.CHECKS,
    *gradients.CHECKS,
    *training.CHECKS,
    *outgoing.CHECKS,
    *checkpoints.CHECKS,
    *endings.CHECKS,
    *experts.CHECKS,
    *value_head.CHECKS,
    *half_precision.CHECKS,
    *offload.CHECKS,
    *adapters.CHECKS,
)
