"""As `weighted_logprob`, of values: what trains a value head by a gradient that is computed outside."""

from __future__ import annotations

from enginehouse.engines.train import LossValue, TokenView
from enginehouse.rl.losses.aggregate import Unscaled, aggregate


def weighted_value(view: TokenView, *, column: str = "weights", aggregation: Unscaled = "token_mean") -> LossValue:
    """Compute `-weight * value` of the counted tokens.

    Args:
        view: output `values`; columns `loss_mask` and `column`, float32 `(tokens,)`.
        column: name of the column of weights.
        aggregation: see `enginehouse.rl.losses.aggregate`.
    """
    counted = view.columns["loss_mask"].nonzero().squeeze(-1)
    losses = -view.columns[column][counted] * view.outputs["values"][counted]
    return LossValue(*aggregate(losses, view.row[counted], view.rows, aggregation))
