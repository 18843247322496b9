"""The policy gradient itself, without a ratio: exact for one update by samples of the policy as it is.

Source: REINFORCE (Williams 1992). With the advantage `gpg` it is GPG (Chu et al. 2025).
"""

from __future__ import annotations

import torch

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss()
def policy_gradient(tokens: PolicyTokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-A * logprob`."""
    return -tokens.advantages * tokens.logprobs, {}
