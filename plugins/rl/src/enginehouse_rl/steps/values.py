from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.controller import Balanced
from enginehouse.roles.sequence_scores import VALUES
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.controller.future import Future
    from enginehouse.roles.placement import Roles


class ValuesStage(BatchStage):
    """Adds `values`: for a token in `loss_mask` the value of the state in which it was sampled, for other tokens 0.

    The critic computes them while the actor and the reference work.
    """

    phase = "values"
    _values: Future

    def begin(self, batch: DistributedBatch, roles: Roles) -> None:
        dealt = Balanced(batch.select(["input_ids", "loss_mask"]), by="input_ids")
        self._values = roles.groups["critic"].call("forward", dealt, VALUES, blocking=False)

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        return batch.joined(self._values.result())
