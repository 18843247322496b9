"""On-policy distillation: a token is credited with how much likelier a teacher finds it than the policy that drew it.

Source: Lu et al. 2025, "On-Policy Distillation" (Thinking Machines); Agarwal et al. 2024 (GKD) with reverse KL on the
student's own samples. A_t = log p_teacher(t) - log p(t): minus the k1 estimate of KL(policy, teacher) at each token,
which the policy gradient then lowers. The teacher is who fills `reference_logprobs`; p is the policy as it is, also of
tokens that an older one drew, where the actor computes its logprobs anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.tokens import CountedTokens

if TYPE_CHECKING:
    from enginehouse.data import Batch


def distillation(batch: Batch, *, gamma: Annotated[float, Field(ge=0, le=1)] = 0.0) -> Batch:
    """Add `advantages` float32 by token.

    Args:
        batch: by token `old_logprobs` and `reference_logprobs` float32, and `loss_mask`.
        gamma: discount of what later tokens are credited with; 0: a token answers for itself alone, 1: for all that
            follows, which is the gradient of the whole sequence's divergence.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    nearer = tokens.of(batch.ragged("reference_logprobs")) - tokens.of(batch.ragged("old_logprobs"))
    return batch.with_columns(advantages=tokens.column(tokens.sums_to_the_end(nearer, gamma)))
