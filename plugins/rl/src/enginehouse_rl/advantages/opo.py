"""OPO compares a reward with the mean of its group, in which samples are weighted by their length.

Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline": A_i = r_i - sum(l_j * r_j) / sum(l_j). This
baseline has the least variance if the squared gradient of a response grows with its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.advantages.groups import group_statistics, group_sums

if TYPE_CHECKING:
    from enginehouse.data import Batch


def opo(batch: Batch) -> Batch:
    """Add `advantages` float32 `(rows,)` to a batch with `reward`, `group` and `response_tokens`, each `(rows,)`."""
    lengths, group = batch["response_tokens"].double(), batch["group"]
    _, distances, _ = group_statistics(batch["reward"], group)
    of_baseline = group_sums(lengths * distances, group) / group_sums(lengths, group).clamp(min=1)
    return batch.with_columns(advantages=(distances - of_baseline).float())
