"""CISPO weights the policy gradient of each token by its clipped ratio, so that no token loses its gradient.

Source: MiniMax 2025, "MiniMax-M1": -sg[clip(ratio, 1 - low, 1 + high)] * A * log p. As in the paper, the default has no
lower bound.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss()
def cispo(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0,
    clip_high: Annotated[float, Field(gt=0)] = 4.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-sg[clip(ratio)] * A * logprob`. Metric `clip_fraction`: fraction of the tokens whose ratio was clipped.

    Args:
        clip_low: the weight is at least `1 - clip_low`; 1: no lower bound.
        clip_high: the weight is at most `1 + clip_high`.
    """
    ratio = tokens.log_ratio.detach().exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weights * tokens.advantages * tokens.logprobs, {"clip_fraction": weights != ratio}
