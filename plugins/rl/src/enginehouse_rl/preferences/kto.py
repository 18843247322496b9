"""KTO trains on single responses that are labelled good or bad, with a value function of prospect theory.

Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", eq. 8.
"""

from __future__ import annotations

import torch

from enginehouse_rl.preferences.slopes import Judgement, differentiate, make_leaf


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
    """Compute `weight * (1 - sigmoid(+-(beta r - beta z0)))` for each response, with + for desirable responses.

    `r` is the log ratio of policy and reference. `z0` estimates the policy's distance from the reference by the mean
    log ratio of responses to other prompts; it is at least 0 and has no gradient.

    Args:
        policy: Sums of the policy's logprobs of the responses, `(rows,)`.
        reference: Sums of the reference's logprobs, `(rows,)`.
        label: True for desirable responses, bool `(rows,)`.
        mismatched: Log ratios of the responses, each placed after the prompt of another response.
        beta: Strength with which the policy is kept close to the reference.
        desirable_weight: The paper's lambda for desirable responses.
        undesirable_weight: The paper's lambda for other responses.
    """
    policy = make_leaf(policy)
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
    return differentiate(weights * (1 - gains), policy, metrics)
