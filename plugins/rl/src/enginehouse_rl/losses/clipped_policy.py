"""The clipped policy loss moves the policy in the advantage's direction, but not beyond a range around the old policy.

Source: PPO (Schulman et al. 2017), eq. 7. The asymmetric range ("clip-higher") is from DAPO (Yu et al. 2025), eq. 10.
The upper bound on the loss for negative advantages ("dual clip") is from Ye et al. 2020, eq. 5. The KL term is from
GRPO (Shao et al. 2024), eq. 3.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from enginehouse_rl.losses.policy import PolicyTokens, policy_loss


@policy_loss()
def clipped_policy(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2,
    clip_high: Annotated[float, Field(gt=0)] = 0.2,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute `-min(ratio * A, clip(ratio) * A)`. Metric `clip_fraction`: fraction of the tokens that were clipped.

    Args:
        clip_low: a ratio that falls below `1 - clip_low` lowers the loss no further.
        clip_high: a ratio that rises above `1 + clip_high` lowers the loss no further.
        dual_clip: for negative advantages the loss is at most `dual_clip * -advantage`; must exceed 1.
    """
    advantages, ratio = tokens.advantages, tokens.log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses, {"clip_fraction": ((ratio - clipped) * advantages).detach() > 0}
