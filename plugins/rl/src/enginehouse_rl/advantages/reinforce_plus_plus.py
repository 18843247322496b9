"""REINFORCE++ credits a token with the rewards from that token on, normalized over all tokens of the step.

Source: Hu et al. 2025, "REINFORCE++": the return of token t is the discounted sum of the rewards from t on, including
each token's KL term; advantages are the normalized returns of the whole batch. In a step with equal rewards, only the
KL term differs, so normalizing scales it to full size, whatever its coefficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.tokens import CountedTokens, normalized

if TYPE_CHECKING:
    from enginehouse.data import Batch


def reinforce_plus_plus(batch: Batch, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> Batch:
    """Add the column `advantages`: float32, one value for each token.

    Args:
        batch: the samples of a step. `reward` float32 `(rows,)` is earned at the row's last counted token.
            `token_rewards` float32 and `loss_mask` have one value for each token.
        gamma: discount of a later reward, per token.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    returns = tokens.sums_to_the_end(tokens.rewards(batch), gamma)
    return batch.with_columns(advantages=tokens.column(normalized(returns)))
