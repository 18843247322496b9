"""On-policy distillation credits a token with its logprob under a teacher, minus its logprob under the policy that
generated it.

Source: Lu et al. 2025, "On-Policy Distillation" (Thinking Machines); Agarwal et al. 2024 (GKD) with reverse KL on the
student's own samples. A_t = log p_teacher(t) - log p(t) is minus the k1 estimate of KL(policy, teacher) at each token,
so the policy gradient lowers this divergence. `reference_logprobs` are the logprobs of the teacher. p is the current
policy if the actor recomputes its logprobs, even for tokens that an older policy generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.tokens import CountedTokens

if TYPE_CHECKING:
    from enginehouse.data import Batch


def distillation(batch: Batch, *, gamma: Annotated[float, Field(ge=0, le=1)] = 0.0) -> Batch:
    """Add the column `advantages`: float32, one value for each token.

    Args:
        batch: columns with one value for each token: `old_logprobs` and `reference_logprobs` float32, and `loss_mask`.
        gamma: discount of the credit of later tokens. 0: a token gets only its own credit. 1: it also gets the credit
            of all later tokens. The gradient is then the gradient of the divergence between whole sequences.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    nearer = tokens.of(batch.ragged("reference_logprobs")) - tokens.of(batch.ragged("old_logprobs"))
    return batch.with_columns(advantages=tokens.column(tokens.sums_to_the_end(nearer, gamma)))
