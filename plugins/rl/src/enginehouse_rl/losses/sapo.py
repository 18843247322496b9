"""SAPO: a gate instead of a clip range. The further the ratio is from 1, the less of the gradient passes the gate.

Source: Gao et al. 2025, "Soft Adaptive Policy Optimization": -A * sigmoid(tau * (ratio - 1)) * 4 / tau, with one tau
for tokens of positive advantage and a larger tau for other tokens. At ratio 1 its gradient is the policy gradient.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss(aggregation="sequence_mean_token_mean")
def sapo(
    tokens: PolicyTokens,
    *,
    tau_positive: Annotated[float, Field(gt=0)] = 1.0,
    tau_negative: Annotated[float, Field(gt=0)] = 1.05,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-A * gate(ratio)`; metric `gate`: the mean slope of the gate, 1 at ratio 1.

    Args:
        tau_positive: speed at which the gate closes for tokens of positive advantage.
        tau_negative: speed at which the gate closes for other tokens. Their gradients make many unlikely tokens more
            likely, so they are less stable.
    """
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -advantages * gate * 4 / tau, {"gate": (4 * gate * (1 - gate)).detach()}
