"""The advantage estimator `acme_algorithm`."""

from __future__ import annotations

import torch
from enginehouse.data import Batch


def acme_algorithm_advantage(batch: Batch) -> Batch:
    """Return each sample's reward minus the median reward of its group, the same for every token.

    Args:
        batch: columns `reward` float32 `(rows,)` and `group` int64 `(rows,)`.
    """
    rewards, groups = batch["reward"], batch["group"]
    advantages = torch.empty_like(rewards)
    for group in groups.unique():
        members = groups == group
        advantages[members] = rewards[members] - rewards[members].quantile(0.5)
    return batch.with_columns(advantages=advantages)
