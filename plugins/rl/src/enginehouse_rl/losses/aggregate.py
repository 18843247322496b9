"""Aggregations of per-token losses into one number. Each gives a sum, and the weight by which the sum is divided.

| name | result | source |
|---|---|---|
| `token_mean` | mean over all counted tokens | DAPO (Yu et al. 2025), eq. 12 |
| `sequence_mean_token_mean` | mean over sequences of each sequence's token mean | GRPO (Shao et al. 2024), eq. 3 |
| `sequence_mean_token_sum` | mean over sequences of each sequence's token sum | REINFORCE |
| `sequence_mean_token_sum_scaled` | as above, each sum divided by a fixed `max_tokens` | Dr. GRPO (Liu et al. 2025) |
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from enginehouse.errors import ConfigError, nearest

__all__ = ["aggregate"]

Unscaled = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"]
Aggregation = Literal[Unscaled, "sequence_mean_token_sum_scaled"]
AGGREGATIONS = get_args(Aggregation)


def count_tokens(row: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of tokens of each row, `(rows,)`. Unlike `bincount`, this does not wait for a GPU.

    Args:
        row: The row of each token, int64 `(tokens,)`.
        rows: Number of rows.
        dtype: dtype of the result.
    """
    ones = torch.ones(len(row), dtype=dtype, device=row.device)
    return torch.zeros(rows, dtype=dtype, device=row.device).index_add_(0, row, ones)


def aggregate(
    losses: torch.Tensor, row: torch.Tensor, rows: int, aggregation: str, max_tokens: int | None = None
) -> tuple[torch.Tensor, float]:
    """Sum per-token losses for an aggregation.

    Args:
        losses: The losses of the counted tokens, float `(counted,)`.
        row: The row of each token, int64 `(counted,)`.
        rows: Number of rows in the micro-batch; a row without counted tokens weighs nothing.
        aggregation: An entry of `AGGREGATIONS`.
        max_tokens: Divisor of `sequence_mean_token_sum_scaled`.

    Returns:
        The scalar total and the weight; both add up over micro-batches and ranks.

    Raises:
        ConfigError: The aggregation is unknown, or needs `max_tokens`.
    """
    if aggregation == "token_mean":
        return losses.sum(), float(losses.numel())
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"unknown loss aggregation {aggregation!r}. {nearest(aggregation, AGGREGATIONS)}")
    counts = count_tokens(row, rows, losses.dtype)
    weight = float((counts > 0).sum())
    if aggregation == "sequence_mean_token_mean":
        return (losses / counts[row]).sum(), weight
    if aggregation == "sequence_mean_token_sum":
        return losses.sum(), weight
    if not max_tokens:
        raise ConfigError(f"loss aggregation {aggregation!r} needs max_tokens: set algorithm.loss.arguments.max_tokens")
    return losses.sum() / max_tokens, weight
