from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.data.columns import TEXTS
from enginehouse.plugin import resolve
from enginehouse.roles.workers import fill_defaults
from enginehouse_rl.episodes.episode_rows import EpisodeRows
from enginehouse_rl.losses.kl import KL_PENALTY
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.plan.plan import Plan
    from enginehouse_rl.plan.stages import StagePlan


class AdvantageStage(BatchStage):
    """Adds the columns that the configured advantage estimator returns. The estimator gets one row per episode, with
    only the columns that it needs."""

    phase = "advantage"

    def __init__(self, plan: Plan, planned: StagePlan):
        super().__init__(plan, planned)
        self._estimate = partial(resolve(plan.advantage.reference), **plan.advantage.arguments)

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        columns = fetch_columns(batch, self.planned.needs)
        estimates = EpisodeRows(batch["episode"]).apply(self._estimate, columns, batch.lengths("input_ids"))
        return batch.with_columns(**estimates)


def fetch_columns(batch: DistributedBatch, needs: Sequence[str] | None) -> Batch:
    """Fetch the columns that an advantage estimator needs, for all rows of the batch.

    Args:
        batch: A step's samples. Missing `token_rewards` become 0, missing `old_logprobs` become the rollout's logprobs,
            and a missing `KL_PENALTY` is left out.
        needs: The names of the columns; None: all columns except texts.
    """
    if needs is None:
        return fill_defaults(batch.drop(list(TEXTS)).fetch())
    if "token_rewards" in needs and "token_rewards" not in batch:
        lengths = batch.lengths("input_ids")
        batch = batch.with_columns(token_rewards=Ragged.from_lengths(torch.zeros(int(lengths.sum())), lengths))
    logprobs = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    names = (logprobs if name == "old_logprobs" else name for name in needs if name in batch or name != KL_PENALTY)
    return fill_defaults(batch.fetch(tuple(dict.fromkeys(names))))
