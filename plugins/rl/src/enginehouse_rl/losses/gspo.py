"""GSPO: the clipped policy loss with one ratio for a whole sequence, because the reward also belongs to a whole
sequence.

Source: Zheng et al. 2025, "Group Sequence Policy Optimization", in its token-level form (GSPO-token): with s =
(p(response) / p_old(response))^(1 / length), the ratio of token t is sg[s] * p(t) / sg[p(t)]. Its value is s, and its
gradient is s times the gradient of the token's logprob.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss(aggregation="sequence_mean_token_mean")
def gspo(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4,
    clip_high: Annotated[float, Field(gt=0)] = 4e-4,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-min(s * A, clip(s) * A)`. Metric `clip_fraction`: fraction of the tokens that were clipped.

    Args:
        clip_low: a ratio of a sequence that falls below `1 - clip_low` lowers the loss no further.
        clip_high: a ratio of a sequence that rises above `1 + clip_high` lowers the loss no further. Both bounds are
            far smaller than for single tokens, because the ratio is a mean over many tokens.
    """
    logprobs, advantages = tokens.logprobs, tokens.advantages
    ratio = (tokens.row_means(tokens.log_ratio).detach() + logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    return losses, {"clip_fraction": ((ratio - clipped) * advantages).detach() > 0}
