"""KTO: responses that are each called good or bad, without pairs, by a value function of prospect theory.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", eq. 8.
"""

from __future__ import annotations

import torch

from enginehouse_rl.preferences.slopes import Judgement, judgement, leaf


def kto(
    policy: torch.Tensor,
    reference: torch.Tensor,
    label: torch.Tensor,
    mismatched: torch.Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Judgement:
    """Compute `weight * (1 - sigmoid(+-(beta r - beta z0)))` of each response, + where it is desirable.

    `r` is the log ratio of policy and reference, `z0` what the policy is away from the reference: the mean log ratio of
    responses of other prompts, at least 0, which has no gradient.

    Args:
        policy: sums of logprobs of responses, `(rows,)`.
        reference: the same, of the reference.
        label: bool `(rows,)`, whether the response is desirable.
        mismatched: log ratios of responses after prompts they do not belong to, to estimate `z0`.
        beta: how dear it is to leave the reference.
        desirable_weight: lambda of the paper, of responses that are desirable.
        undesirable_weight: of those that are not.
    """
    policy = leaf(policy)
    z0 = mismatched.double().mean().clamp(min=0)
    rewards = beta * (policy - reference.double())
    above = rewards - beta * z0
    gains = torch.where(label, torch.sigmoid(above), torch.sigmoid(-above))
    weights = torch.tensor([undesirable_weight, desirable_weight], dtype=torch.float64)[label.long()]
    metrics = {
        "accuracy": ((above > 0) == label).double(),
        "rewards/chosen": rewards[label],
        "rewards/rejected": rewards[~label],
        "kl": z0[None],
    }
    return judgement(weights * (1 - gains), policy, metrics)
