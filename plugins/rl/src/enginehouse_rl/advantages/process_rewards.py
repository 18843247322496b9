"""Process rewards credit a token with the rewards of the steps that end at this token or later. Each step's reward is
compared with the rewards of all steps of the group.

Source: DeepSeekMath (Shao et al. 2024), section 4.1.3, process supervision: with R all step rewards of the group, A_t =
sum over the steps that end at t or later of (r - mean(R)) / std(R).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.groups import group_statistics, kl_distances
from enginehouse_rl.advantages.tokens import CountedTokens

if TYPE_CHECKING:
    from enginehouse.data import Batch


def process_rewards(batch: Batch, *, epsilon: Annotated[float, Field(gt=0)] = 1e-6) -> Batch:
    """Add the column `advantages`: float32, one value for each token.

    A step ends at each token whose reward is not 0, and at a row's last counted token, whatever its reward. Therefore a
    reward of 0 does not end a step. To end a step without value, give it a tiny reward. Without `token_rewards` this is
    `grpo`. A KL term in the reward belongs to no step: as in `grpo`, all tokens of a row are credited with it.

    Args:
        batch: the samples of a step. `reward` float32 and `group` int64 are `(rows,)`. `token_rewards` float32 and
            `loss_mask` have one value for each token. If there is a column `kl_penalty`, the result of `kl_distances`
            is subtracted from the advantages.
        epsilon: number added to the standard deviation. A group of equal step rewards has advantages of exactly 0,
            apart from a KL term.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    rewards = tokens.rewards(batch)
    ends = rewards != 0
    ends[tokens.last] = True
    _, distances, deviations = group_statistics(rewards[ends], batch["group"][tokens.row[ends]])
    rewards[ends] = distances / (deviations + epsilon)
    credits = tokens.sums_to_the_end(rewards, 1.0) - kl_distances(batch)[tokens.row]
    return batch.with_columns(advantages=tokens.column(credits))
