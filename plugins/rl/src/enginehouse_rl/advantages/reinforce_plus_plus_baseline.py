"""REINFORCE++ with a baseline compares a reward with its group's mean, in standard deviations of all tokens of the
step.

Source: Hu et al. 2025, "REINFORCE++", the variant with a baseline. Only the mean comes from the group. The standard
deviation of a group is noisy, and 0 if all rewards are equal. Therefore the divisor is the standard deviation of all
tokens of the step. A KL term in the reward is also compared within the group, but it is not divided by the standard
deviation. In the paper, the KL term is in the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.advantages.groups import group_statistics, kl_distances
from enginehouse_rl.advantages.tokens import CountedTokens, normalized

if TYPE_CHECKING:
    from enginehouse.data import Batch


def reinforce_plus_plus_baseline(batch: Batch) -> Batch:
    """Add `advantages`, float32 with one value for each token, to a batch with `reward`, `group` and `loss_mask`.

    If the batch has the column `kl_penalty`, the result of `kl_distances` is subtracted from the advantages.
    """
    tokens = CountedTokens(batch.ragged("loss_mask"))
    _, distances, _ = group_statistics(batch["reward"], batch["group"])
    credits = normalized(distances[tokens.row]) - kl_distances(batch)[tokens.row]
    return batch.with_columns(advantages=tokens.column(credits))
