"""The most general policy loss: minus the sum of weight times logprob over the counted tokens.

The gradient of any policy loss with respect to the logprobs is one number for each logprob. If the controller computes
these numbers and sends them as weights, an engine that supports only this loss can train with any algorithm.
"""

from __future__ import annotations

from enginehouse.engines.train import LossValue, TokenView
from enginehouse_rl.losses.aggregate import Unscaled, aggregate


def weighted_logprob(view: TokenView, *, column: str = "weights", aggregation: Unscaled = "token_mean") -> LossValue:
    """Compute `-weight * logprob` of the counted tokens.

    Args:
        view: output `logprobs`; columns `loss_mask` and `column`, float32 `(tokens,)`.
        column: name of the column of weights.
        aggregation: the kind of mean over tokens and sequences. `enginehouse_rl.losses.aggregate` lists the kinds.
    """
    return weighted(view, "logprobs", column, aggregation)


def weighted(view: TokenView, output: str, column: str, aggregation: Unscaled) -> LossValue:
    """Compute `-weight * output` of the counted tokens."""
    counted = view.counted_tokens()
    losses = -view.columns[column][counted] * view.outputs[output][counted]
    return LossValue(*aggregate(losses, view.row[counted], view.rows, aggregation))
