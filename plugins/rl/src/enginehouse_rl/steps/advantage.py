"""Advantages: what the estimator of the config makes of the columns that it needs."""

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
    """Adds what the estimator adds. It is given a row an episode, and no column that it does not need is read."""

    phase = "advantage"

    def __init__(self, plan: Plan, planned: StagePlan):
        super().__init__(plan, planned)
        self._estimate = partial(resolve(plan.advantage.reference), **plan.advantage.arguments)

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        given = columns_for(batch, self.planned.needs)
        made = EpisodeRows(batch["episode"]).made(self._estimate, given, batch.lengths("input_ids"))
        return batch.with_columns(**made)


def columns_for(batch: DistributedBatch, needs: Sequence[str] | None) -> Batch:
    """Bring the columns that an advantage needs here, a row of the result for each of the batch.

    Args:
        batch: a step's samples. Without `token_rewards` these are 0; without `old_logprobs` they are the rollout's; and
            `KL_PENALTY` is left out where no KL term made it.
        needs: their names; None: all but texts.
    """
    if needs is None:
        return fill_defaults(batch.drop(list(TEXTS)).fetch())
    if "token_rewards" in needs and "token_rewards" not in batch:
        lengths = batch.lengths("input_ids")
        batch = batch.with_columns(token_rewards=Ragged.from_lengths(torch.zeros(int(lengths.sum())), lengths))
    own = "old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"
    names = (own if name == "old_logprobs" else name for name in needs if name in batch or name != KL_PENALTY)
    return fill_defaults(batch.fetch(tuple(dict.fromkeys(names))))
