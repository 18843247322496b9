"""ReMax credits a sample with its rewards minus the reward of the greedy response to its prompt.

Source: Li et al. 2023, "ReMax": A_t = sum of the rewards from t on, minus the baseline. For the baseline the policy
answers each prompt once more, and this response is not trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.advantages.tokens import CountedTokens

if TYPE_CHECKING:
    from enginehouse.data import Batch


def remax(batch: Batch) -> Batch:
    """Add the column `advantages`: float32, one value for each token.

    Args:
        batch: the samples of a step. `reward` and `baseline` float32 are `(rows,)`. `token_rewards` float32 and
            `loss_mask` have one value for each token.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    returns = tokens.sums_to_the_end(tokens.rewards(batch), 1.0)
    return batch.with_columns(advantages=tokens.column(returns - batch["baseline"].double()[tokens.row]))
