"""RLOO credits a sample with its reward minus the mean reward of the other samples of its prompt.

Source: Ahmadian et al. 2024, "Back to Basics", eq. 8: A_i = r_i - mean of r_j over j != i, the same for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.advantages.groups import group_statistics

if TYPE_CHECKING:
    from enginehouse.data import Batch


def rloo(batch: Batch) -> Batch:
    """Add `advantages` float32 `(rows,)` to a batch with `reward` float32 `(rows,)` and `group` int64 `(rows,)`.

    A group with one sample has no baseline, so its advantage is 0.
    """
    sizes, distances, _ = group_statistics(batch["reward"], batch["group"])
    return batch.with_columns(advantages=(distances * sizes / (sizes - 1).clamp(min=1)).float())
