"""DPO trains a policy on pairs of responses, without a separate reward model.

The reward of a response is `beta * (log policy - log reference)`. The loss depends on the difference between the
rewards of the chosen and the rejected response. With h the difference of their log ratios:

| name | loss of a pair | source |
|---|---|---|
| `sigmoid` | `-log sigmoid(beta h)`; label smoothing assumes some wrong labels | Rafailov et al. 2023, eq. 7; cDPO |
| `hinge` | `max(0, 1 - beta h)` | SLiC (Zhao et al. 2023), in the form of Liu et al. 2023 (RSO), eq. 9 |
| `ipo` | `(h - 1 / (2 beta))^2`, with log ratios averaged over tokens | Azar et al. 2023, eq. 17 |
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
        policy: Sums of the policy's logprobs, `(2 * pairs,)`: for each pair the chosen response, then the rejected.
        reference: Sums of the reference's logprobs, in the same order.
        tokens: The lengths of the responses, for the means of `ipo`.
        loss: The loss, as in the table above.
        beta: Strength with which the policy is kept close to the reference.
        label_smoothing: Fraction of wrong labels that `sigmoid` assumes.
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
