"""RLOO: a sample is credited with its reward minus the mean reward of the other samples of its prompt.

Source: Ahmadian et al. 2024, "Back to Basics", eq. 8: A_i = r_i - mean of r_j over j != i, the same for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.rl.advantages.groups import group_statistics, with_token_advantages

if TYPE_CHECKING:
    from enginehouse.data import Batch


def rloo(batch: Batch) -> Batch:
    """Add `advantages` to a batch with columns `reward` float32 `(rows,)`, `group` int64 `(rows,)`, `loss_mask` ragged.

    A group of one has no baseline: its advantage is 0.
    """
    sizes, distances, _ = group_statistics(batch["reward"], batch["group"])
    return with_token_advantages(batch, distances * sizes / (sizes - 1).clamp(min=1))
