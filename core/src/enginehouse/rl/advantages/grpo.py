"""GRPO: a sample is credited with how far its reward stands above its group's mean, in standard deviations.

Source: DeepSeekMath (Shao et al. 2024), section 4.1.2, outcome supervision: A_i = (r_i - mean(r)) / std(r), the same
for every token of the response. `scale=False` leaves the division out: Dr. GRPO (Liu et al. 2025), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse.rl.advantages.groups import group_statistics, with_token_advantages

if TYPE_CHECKING:
    from enginehouse.data import Batch


def grpo(batch: Batch, *, scale: bool = True, epsilon: Annotated[float, Field(gt=0)] = 1e-6) -> Batch:
    """Add `advantages` to a batch with columns `reward` float32 `(rows,)`, `group` int64 `(rows,)`, `loss_mask` ragged.

    Args:
        batch: the samples of a step; all samples of a group are in it.
        scale: divide by the group's standard deviation.
        epsilon: added to the standard deviation. A group of equal rewards has advantages of exactly 0.
    """
    _, distances, deviations = group_statistics(batch["reward"], batch["group"])
    return with_token_advantages(batch, distances / (deviations + epsilon) if scale else distances)
