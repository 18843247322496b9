"""The clipped policy loss: take the advantage's direction, but no further than the clip range from the old policy.

Source: PPO (Schulman et al. 2017), eq. 7; the asymmetric range ("clip-higher") is DAPO's (Yu et al. 2025), eq. 10; the
lower bound for negative advantages ("dual clip") is Ye et al. 2020, eq. 5. The KL term: GRPO (Shao et al. 2024), eq. 3.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse.config.schema import KLEstimator
from enginehouse.engines.train import LossValue, Mean, TokenView
from enginehouse.rl.kl import token_kl
from enginehouse.rl.losses.aggregate import Aggregation, aggregate
from enginehouse.rl.losses.importance import truncated_importance


def clipped_policy(
    view: TokenView,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2,
    clip_high: Annotated[float, Field(gt=0)] = 0.2,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
    importance_cap: Annotated[float, Field(gt=0)] | None = None,
    aggregation: Aggregation = "token_mean",
    max_tokens: Annotated[int, Field(gt=0)] | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coefficient: float = 0.0,
) -> LossValue:
    """Compute the clipped policy loss over the tokens that `loss_mask` counts.

    Args:
        view: outputs `logprobs` (and `entropy`, if `entropy_coefficient` is set); columns `loss_mask` bool,
            `old_logprobs` and `advantages` float32, with a KL term `reference_logprobs`, and with an importance cap
            `rollout_logprobs`, each `(tokens,)`.
        clip_low: the ratio is not rewarded for falling below `1 - clip_low`.
        clip_high: nor for rising above `1 + clip_high`.
        dual_clip: for negative advantages the loss is at most `dual_clip * -advantage`; must exceed 1.
        importance_cap: weigh each token's clipped loss, not the KL term or the entropy bonus, by
            `min(exp(old_logprobs - rollout_logprobs), importance_cap)`; see `enginehouse.rl.losses.importance`. Needs
            `algorithm.old_logprobs=actor`: with the rollout's own the weight is 1 everywhere.
        aggregation: see `enginehouse.rl.losses.aggregate`.
        max_tokens: for the aggregation that divides by it; in a run, unset: `rollout.sampling.max_tokens`.
        kl_coefficient: weight of the divergence from the reference.
        kl_estimator: `"k1"`, `"k2"` or `"k3"`.
        entropy_coefficient: weight of the entropy bonus.

    Returns:
        The loss, with metrics `clip_fraction`, `ratio`, `policy_kl` (k3, old to new) and, where used, `kl`, `entropy`,
        `importance_weight` and `importance_capped`, the part of the tokens whose weight was cut.
    """
    counted = view.columns["loss_mask"].nonzero().squeeze(-1)
    logprobs = view.outputs["logprobs"][counted]
    advantages = view.columns["advantages"][counted]
    log_ratio = logprobs - view.columns["old_logprobs"][counted]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)

    extra: dict[str, torch.Tensor] = {}
    if importance_cap is not None:
        weights, cut = truncated_importance(view, counted, importance_cap)
        losses = losses * weights
        extra |= {"importance_weight": weights, "importance_capped": cut}
    if kl_coefficient:
        extra["kl"] = token_kl(logprobs, view.columns["reference_logprobs"][counted], kl_estimator)
        losses = losses + kl_coefficient * extra["kl"]
    if entropy_coefficient:
        extra["entropy"] = view.outputs["entropy"][counted]
        losses = losses - entropy_coefficient * extra["entropy"]

    total, weight = aggregate(losses, view.row[counted], view.rows, aggregation, max_tokens)
    with torch.no_grad():
        outside = ((ratio - clipped) * advantages) > 0
        measured = {
            "clip_fraction": outside.sum(),
            "ratio": ratio.sum(),
            "policy_kl": ((ratio - 1) - log_ratio).sum(),
            **{name: value.sum() for name, value in extra.items()},
        }
        sums = torch.stack([value.float() for value in measured.values()]).tolist()  # one transfer from the device
    tokens = float(len(counted))
    return LossValue(total, weight, {name: Mean(value, tokens) for name, value in zip(measured, sums, strict=True)})
