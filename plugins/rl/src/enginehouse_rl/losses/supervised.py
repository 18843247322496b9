"""Supervised fine-tuning: the mean negative log-likelihood of the demonstrated tokens."""

from __future__ import annotations

from enginehouse.engines.train import LossValue, TokenView
from enginehouse_rl.losses.aggregate import Unscaled, aggregate


def supervised(view: TokenView, *, aggregation: Unscaled = "token_mean") -> LossValue:
    """Compute the negative log-likelihood, in nats, of the tokens that `loss_mask` counts.

    Args:
        view: output `logprobs`; column `loss_mask`.
        aggregation: the kind of mean over tokens and sequences. `enginehouse_rl.losses.aggregate` lists the kinds.
    """
    counted = view.counted_tokens()
    total, weight = aggregate(-view.outputs["logprobs"][counted], view.row[counted], view.rows, aggregation)
    return LossValue(total, weight)
