from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse_rl.losses.kl import adapt_coefficient, resumed_coefficient, with_kl_in_reward
from enginehouse_rl.steps.stage import BatchStage

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.plan.plan import Plan
    from enginehouse_rl.plan.stages import StagePlan


class KLInRewardStage(BatchStage):
    """Subtracts the KL term from the rewards, and reports the mean divergence as the metric `kl`.

    The plan chooses the column from which the term is subtracted (`planned.adds`): `reward` or `token_rewards`. If the
    plan chooses `kl_penalty`, the term is stored in this column, and the rewards stay unchanged. With
    `algorithm.kl.place=loss` there is no such stage, because the loss computes the KL term.
    """

    phase = "reference"

    def __init__(self, plan: Plan, planned: StagePlan):
        super().__init__(plan, planned)
        self._kl = plan.config.algorithm.kl
        self._coefficient = self._kl.coefficient

    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        used, (into,) = self._coefficient, self.planned.adds
        batch, mean = with_kl_in_reward(batch, used, self._kl.chosen_estimator, into)
        self.figures = {"kl": mean}
        if self._kl.target is not None:
            self._coefficient = adapt_coefficient(used, mean, self._kl.target)
            self.figures = {"kl": mean, "kl_coefficient": used}
        return batch

    def state(self) -> dict[str, Any]:
        return {"kl_coefficient": self._coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        earlier = self.plan.resumed.config["algorithm"]["kl"] if self.plan.resumed else {}
        self._coefficient = resumed_coefficient(self._kl, earlier, state.get("kl_coefficient"))
