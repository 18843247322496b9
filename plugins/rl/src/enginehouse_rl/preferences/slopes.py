"""From figures of rows to the weights of an update: how a loss of pairs is trained by engines that see rows one by one.

Losses of preferences read one figure a row: the sum of the logprobs of its response, or its score. `forward` gives the
figures, the controller the loss and its derivative by each of them in float64, and the update minimises the linear loss
with these derivatives as weights (`weighted_logprob`, `weighted_value`). Its gradient is that of the loss itself at
these weights of the model, however the rows of a pair are cut over ranks and micro-batches, on every engine. It costs a
forward pass more, is exact for the one optimizer step that follows, and needs that there is no dropout: there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from enginehouse.data import Batch


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a loss makes of the figures of a step's rows.

    Attributes:
        losses: of each pair, or of each row where there are none, float64; their mean is what is minimised.
        slopes: derivative of that mean by each row's figure, float64 `(rows,)`.
        metrics: further figures, means over what they are named for: of each the values, float64.
    """

    losses: torch.Tensor
    slopes: torch.Tensor
    metrics: Mapping[str, torch.Tensor]


def judgement(losses: torch.Tensor, figures: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> Judgement:
    """Differentiate losses by what they were computed from.

    Args:
        losses: with a gradient.
        figures: of the rows, a leaf.
        metrics: as in `Judgement`; a gradient is taken off.
    """
    (slopes,) = torch.autograd.grad(losses.mean(), figures)
    return Judgement(losses.detach(), slopes, {name: values.detach() for name, values in metrics.items()})


def accuracy(above: torch.Tensor) -> torch.Tensor:
    """Return of each pair whether the better response is above the other; a tie, as before the first step, is half."""
    return (above.detach().sign() + 1) / 2


def leaf(figures: torch.Tensor) -> torch.Tensor:
    """Figures in float64, to differentiate by."""
    return figures.detach().double().requires_grad_()


def with_weights(batch: Batch, slopes: torch.Tensor) -> Batch:
    """Add the column `weights` with which the linear losses, as means over rows, have the gradient that `slopes` say.

    Args:
        batch: `loss_mask`, and what else the update gets.
        slopes: derivative of the loss by each row's figure, float64 `(rows,)`.
    """
    mask = batch.ragged("loss_mask")
    each = np.repeat((-len(batch) * slopes).float().numpy(), mask.lengths.numpy())
    return batch.with_columns(weights=mask.like(torch.from_numpy(each)))
