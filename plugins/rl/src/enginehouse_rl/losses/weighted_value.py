"""Trains a value head by a gradient that is computed outside the engine, as `weighted_logprob` does for a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.losses.aggregate import Unscaled
from enginehouse_rl.losses.weighted_logprob import weighted

if TYPE_CHECKING:
    from enginehouse.engines.train import LossValue, TokenView


def weighted_value(view: TokenView, *, column: str = "weights", aggregation: Unscaled = "token_mean") -> LossValue:
    """Compute `-weight * value` of the counted tokens.

    Args:
        view: output `values`; columns `loss_mask` and `column`, float32 `(tokens,)`.
        column: name of the column of weights.
        aggregation: the kind of mean over tokens and sequences. `enginehouse_rl.losses.aggregate` lists the kinds.
    """
    return weighted(view, "values", column, aggregation)
