"""DPO: a policy is its own reward model, relative to a reference; pairs of responses train it without one.

The reward of a response is `beta * (log policy - log reference)`, and the loss is one of the margin by which the chosen
response's is above the rejected one's. With h the margin of the log ratios:

| loss | of a pair | source |
|---|---|---|
| `sigmoid` | `-log sigmoid(beta h)`; smoothed, some labels are wrong | Rafailov et al. 2023, eq. 7; cDPO |
| `hinge` | `max(0, 1 - beta h)` | SLiC, Zhao et al. 2023, as of Liu et al. 2023 (RSO), eq. 9 |
| `ipo` | `(h - 1 / (2 beta))^2`, of log ratios that are means over tokens | Azar et al. 2023, eq. 17 |
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from enginehouse_rl.preferences.slopes import Judgement, accuracy, judgement, leaf

PairLoss = Literal["sigmoid", "hinge", "ipo"]


def dpo(
    policy: torch.Tensor,
    reference: torch.Tensor,
    tokens: torch.Tensor,
    *,
    loss: PairLoss = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Judgement:
    """Compute the loss of each pair.

    Args:
        policy: sums of logprobs of responses, `(2 * pairs,)`: of each pair the chosen one's, then the rejected one's.
        reference: the same, of the reference.
        tokens: of each response, for the means that `ipo` takes.
        loss: which.
        beta: how dear it is to leave the reference.
        label_smoothing: of `sigmoid`, the share of labels that are wrong.
    """
    policy = leaf(policy)
    ratios = policy - reference.double()
    if loss == "ipo":
        ratios = ratios / tokens.double()
    chosen, rejected = ratios.view(-1, 2).unbind(1)
    h = chosen - rejected
    if loss == "ipo":
        losses = (h - 1 / (2 * beta)) ** 2
    elif loss == "hinge":
        losses = torch.relu(1 - beta * h)
    else:
        losses = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    metrics = {
        "accuracy": accuracy(h),
        "margin": beta * h,
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
    }
    return judgement(losses, policy, metrics)
