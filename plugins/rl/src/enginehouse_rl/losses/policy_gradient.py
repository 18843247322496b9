"""The policy gradient without a ratio. It is exact for a single update on samples of the current policy.

Source: REINFORCE (Williams 1992). With the advantage `gpg` it is GPG (Chu et al. 2025).
"""

from __future__ import annotations

import torch

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss()
def policy_gradient(tokens: PolicyTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-A * logprob`."""
    return -tokens.advantages * tokens.logprobs, {}
