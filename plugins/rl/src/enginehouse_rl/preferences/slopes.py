"""Turns losses of pairs into weights of rows, so that engines which process rows one by one can train on pairs.

A preference loss depends on one number per row: the sum of its response's logprobs, or its score. `forward` returns
these numbers. The controller computes the loss, and in float64 its derivative with respect to each number. The update
minimizes the linear loss with these derivatives as weights (`weighted_logprob`, `weighted_value`). At the model's
current weights, the gradient of the linear loss equals the gradient of the preference loss, on every engine and for
every split of rows over ranks and micro-batches. The method costs one more forward pass. It is exact for one optimizer
step without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from enginehouse.data import Batch


@dataclass(frozen=True, slots=True)
class Judgement:
    """The losses of a step's rows, and their derivatives.

    Attributes:
        losses: The loss of each pair, or of each row if there are no pairs, float64; their mean is minimized.
        slopes: The derivative of this mean with respect to the number of each row, float64 `(rows,)`.
        metrics: Values of further metrics by name, float64; each metric is reported as their mean.
    """

    losses: torch.Tensor
    slopes: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


def differentiate(losses: torch.Tensor, figures: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> Judgement:
    """Differentiate the mean of losses with respect to the rows' numbers `figures`, which must be a leaf tensor. The
    returned metrics carry no gradient."""
    (slopes,) = torch.autograd.grad(losses.mean(), figures)
    return Judgement(losses.detach(), slopes, {name: values.detach() for name, values in metrics.items()})


def accuracy(above: torch.Tensor) -> torch.Tensor:
    """Return 1 for each pair whose better response scores higher, 0 if it scores lower, and 0.5 for a tie."""
    return (above.detach().sign() + 1) / 2


def make_leaf(figures: torch.Tensor) -> torch.Tensor:
    """Return numbers as a float64 leaf tensor, with respect to which a loss can be differentiated."""
    return figures.detach().double().requires_grad_()


def with_weights(batch: Batch, slopes: torch.Tensor) -> Batch:
    """Add the column `weights`. With it, the linear loss, as a mean over rows, has the gradient of the preference loss.

    Args:
        batch: The rows of the update, with `loss_mask`.
        slopes: The derivative of the loss with respect to the number of each row, float64 `(rows,)`.
    """
    mask = batch.ragged("loss_mask")
    weights = np.repeat((-len(batch) * slopes).float().numpy(), mask.lengths.numpy())
    return batch.with_columns(weights=mask.like(torch.from_numpy(weights)))
