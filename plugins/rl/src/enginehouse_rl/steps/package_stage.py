"""The stage of a plugin (`enginehouse.plugin.Stage`) is a function of columns, possibly with a separate model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from enginehouse.controller import Balanced
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import resolve
from enginehouse_rl.episodes.sampling import make_sampling_outputs
from enginehouse_rl.steps.advantage import fetch_columns
from enginehouse_rl.steps.reward_model import score_episodes
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.plan.plan import Plan
    from enginehouse_rl.plan.stages import StagePlan


class PackageStage(BatchStage):
    """Adds the columns of the stage's model, then the columns that the stage's function returns. The function gets the
    model's columns and the columns that the stage needs."""

    def __init__(self, plan: Plan, planned: StagePlan):
        super().__init__(plan, planned)
        assert planned.record is not None
        self._record = record = planned.record
        self.scores = "reward" in record.adds
        self.phase = "reward" if self.scores else f"stages/{record.name}"
        self._function = partial(resolve(record.function), **planned.arguments) if record.function else None

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        record = self._record
        if record.model and len(batch):
            batch = self._with_model(batch, roles)
        if self._function is None or not len(batch):
            return batch
        columns = self._function(fetch_columns(batch, (*record.needs, *record.columns[: bool(record.model)])))
        if missing := [name for name in record.adds if name not in columns]:
            raise EnginehouseError(f"the {self.planned.name} is declared to add {missing[0]!r}, but did not return it")
        return batch.with_columns(**{name: columns[name] for name in record.adds})

    def _with_model(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        record, group = self._record, roles.groups[self.planned.role]
        if record.model == "score":
            scores, _ = score_episodes(batch, roles, group)
            return batch.with_columns(**{f"{record.name}_score": scores})
        dealt = Balanced(batch.select(["input_ids", "loss_mask"]), by="input_ids")
        outputs = make_sampling_outputs(self.plan.config.rollout.sampling)
        return batch.joined(group.forward(dealt, outputs, f"{record.name}_"))
