"""GRPO credits a sample with the distance of its reward from its group's mean, in standard deviations.

Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision: A_i = (r_i - mean(r)) / std(r), the same
for every token of the response. `scale=False` omits the division: Dr. GRPO (Liu et al. 2025), section 3. A KL term in
the reward is also compared within the group, but not divided by the standard deviation, which measures the rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse_rl.advantages.groups import group_statistics, kl_distances

if TYPE_CHECKING:
    from enginehouse.data import Batch


def grpo(batch: Batch, *, scale: bool = True, epsilon: Annotated[float, Field(gt=0)] = 1e-6) -> Batch:
    """Add `advantages` float32 `(rows,)` to a batch with `reward` float32 `(rows,)` and `group` int64 `(rows,)`.

    Args:
        batch: the samples of a step; every group in it must be complete. If it has the column `kl_penalty`, the result
            of `kl_distances` is subtracted from the advantages.
        scale: divide by the group's standard deviation.
        epsilon: number added to the standard deviation. A group of equal rewards has advantages of exactly 0, apart
            from a KL term.
    """
    _, distances, deviations = group_statistics(batch["reward"], batch["group"])
    per_row = distances / (deviations + epsilon) if scale else distances
    return batch.with_columns(advantages=(per_row - kl_distances(batch)).float())
