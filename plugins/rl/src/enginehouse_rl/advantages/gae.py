"""GAE credits a token with the errors of the critic's values at this token and all later ones. Later errors weigh less.

Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation": A_t = sum
over k of (gamma * lam)^k * delta_(t+k), with delta_t = r_t + gamma * V(s_(t+1)) - V(s_t) and V = 0 after the row's last
counted token. The critic learns A_t + V(s_t).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.tokens import CountedTokens, normalized

if TYPE_CHECKING:
    from enginehouse.data import Batch


def gae(
    batch: Batch,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    normalize: bool = True,
) -> Batch:
    """Add the columns `advantages` and `returns`, float32 with one value for each token, to a batch with a critic's
    `values`.

    Args:
        batch: the samples of a step. `reward` float32 `(rows,)` is earned at the row's last counted token.
            `token_rewards` float32, `values` float32 and `loss_mask` have one value for each token.
        gamma: discount of a later reward, per token.
        lam: weight of later errors. 1 relies on the rewards (no bias), 0 on the critic's next value (little variance).
        normalize: give the advantages of all counted tokens of the step a mean of 0 and a standard deviation of 1.
            `returns` are computed from the advantages before normalization.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    values = tokens.of(batch.ragged("values"))
    errors = tokens.rewards(batch) + gamma * tokens.next_in_row(values) - values
    advantages = tokens.sums_to_the_end(errors, gamma * lam)
    credits = normalized(advantages) if normalize else advantages
    return batch.with_columns(advantages=tokens.column(credits), returns=tokens.column(advantages + values))
