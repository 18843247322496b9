"""An advantage, a loss, a reward and a filter."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse.data import Batch
from enginehouse.engines import LossValue, Max, Mean, TokenView
from enginehouse.engines.environment import Group


def centred(batch: Batch, *, scale: Annotated[float, Field(gt=0)] = 1.0) -> Batch:
    """Reward less the mean of its group."""
    _, number = batch["group"].unique(return_inverse=True)
    sums = torch.zeros(int(number.max()) + 1).index_add_(0, number, batch["reward"].float())
    means = sums / number.bincount()
    return batch.with_columns(advantages=scale * (batch["reward"].float() - means[number]))


def reinforce(view: TokenView, *, scale: float = 1.0) -> LossValue:
    """The policy gradient (Williams 1992)."""
    counted = view.columns["loss_mask"]
    logprobs = view.outputs["logprobs"][counted]
    total = -scale * (view.columns["advantages"][counted] * logprobs).sum()
    tokens = float(counted.sum())
    figures = {"logprob": Mean(float(logprobs.detach().sum()), tokens), "rows": Max(float(view.rows))}
    return LossValue(total, tokens, figures)


def right(prompt, response, answer="", **columns):
    """1 for the answer, and a little for each letter of it that is there."""
    return {"reward": float(response == answer) + 0.1 * sum(letter in response for letter in answer), "long": 0.0}


def keep(group: Group) -> bool:
    """Whether a group is trained on."""
    return len(group.episodes) > 0
