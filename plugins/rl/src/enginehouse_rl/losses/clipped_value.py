"""The clipped value loss: a critic's squared error, which falls no further once a value has moved beyond the clip
range.

Source: PPO's reference implementation (Schulman et al. 2017, OpenAI Baselines `ppo2`): L_t = max((v_t - R_t)^2,
(clip(v_t, v_old_t - c, v_old_t + c) - R_t)^2) / 2.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse.engines.train import LossValue, Mean, TokenView
from enginehouse_rl.losses.aggregate import Unscaled, aggregate


def clipped_value(
    view: TokenView, *, clip: Annotated[float, Field(gt=0)] | None = 0.5, aggregation: Unscaled = "token_mean"
) -> LossValue:
    """Compute the clipped squared error of the values of tokens that `loss_mask` counts.

    Args:
        view: Output `values`; columns `loss_mask` bool, `values` (from before the step's first update) and `returns`
            float32, each `(tokens,)`.
        clip: The distance from the old value beyond which the loss no longer falls; `null`: no limit.
        aggregation: the kind of mean over tokens and sequences. `enginehouse_rl.losses.aggregate` lists the kinds.

    Returns:
        The loss, with the metrics `clip_fraction` (fraction of the tokens whose loss is the clipped error),
        `value_mean` and `return_mean`.
    """
    counted = view.counted_tokens()
    values, returns = view.outputs["values"][counted], view.columns["returns"][counted]
    errors = (values - returns).square()
    losses, outside = errors, torch.zeros_like(errors)
    if clip is not None:
        old = view.columns["values"][counted]
        clipped_errors = (values.clamp(old - clip, old + clip) - returns).square()
        losses, outside = torch.maximum(errors, clipped_errors), (clipped_errors > errors).float()
    total, weight = aggregate(losses / 2, view.row[counted], view.rows, aggregation)
    measured = {"clip_fraction": outside, "value_mean": values.detach(), "return_mean": returns}
    sums = torch.stack([value.sum().float() for value in measured.values()]).tolist()  # one transfer from the device
    tokens = float(len(counted))
    return LossValue(total, weight, {name: Mean(value, tokens) for name, value in zip(measured, sums, strict=True)})
