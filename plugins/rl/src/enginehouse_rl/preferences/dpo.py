"""DPO trains a policy by pairs of responses; the policy, relative to a reference, is its own reward model.

The reward of a response is `beta * (log policy - log reference)`. The loss depends on the margin between the rewards of
the chosen and the rejected response. With h the margin of the log ratios:

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

from enginehouse_rl.preferences.slopes import Judgement, accuracy, differentiate, make_leaf

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
        policy: The policy's sums of logprobs, `(2 * pairs,)`: of each pair the chosen, then the rejected response.
        reference: The reference's sums, in the same order.
        tokens: The lengths of the responses, for the means of `ipo`.
        loss: The loss, as in the table above.
        beta: The cost of leaving the reference.
        label_smoothing: The share of wrong labels that `sigmoid` assumes.
    """
    policy = make_leaf(policy)
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
    return differentiate(losses, policy, metrics)
