"""The loss `acme_algorithm`."""

from __future__ import annotations

from typing import Annotated

from enginehouse.engines import LossValue, Mean, TokenView
from pydantic import Field


def acme_algorithm_loss(view: TokenView, *, clip: Annotated[float, Field(gt=0)] = 1.0) -> LossValue:
    """Compute the policy gradient, weighted by the importance ratio. The ratio is at most 1 + clip and has no gradient.

    Args:
        view: output `logprobs`; columns `loss_mask`, `advantages` and `old_logprobs`.
        clip: largest distance of the ratio above 1.
    """
    counted = view.columns["loss_mask"]
    logprobs = view.outputs["logprobs"][counted]
    ratio = (logprobs.detach() - view.columns["old_logprobs"][counted]).exp()
    losses = -ratio.clamp(max=1 + clip) * view.columns["advantages"][counted] * logprobs
    tokens = float(counted.sum())
    return LossValue(losses.sum(), tokens, {"cut": Mean(float((ratio > 1 + clip).sum()), tokens)})
