"""What a stage of a step is: it adds columns to the batch of the step's samples, or changes some.

Which stages a run has, and in which order, is the plan's (`enginehouse_rl.plan.stages`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse.plugin import resolve

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.plan.plan import Plan
    from enginehouse_rl.plan.stages import StagePlan


class BatchStage(ABC):
    """A stage of each step of a run.

    Args:
        plan: the plan of the run.
        planned: the plan of the stage, with the columns that it needs and adds.

    Attributes:
        phase: the phase of a step that its seconds are counted in.
        scores: True if the reward that it leaves is the one that the figures of samples are of.
        figures: metrics of the step that it was called in last.
    """

    phase: str
    scores = False

    def __init__(self, plan: Plan, planned: StagePlan):
        self.plan, self.planned = plan, planned
        self.figures: Mapping[str, float] = {}

    def begin(self, batch: DistributedBatch, roles: Roles) -> None:  # noqa: B027 - a stage may leave it out
        """Begin what needs no other stage, beside those before this one."""

    @abstractmethod
    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        """Return the batch with the stage's columns."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to have of the stage, as plain data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - likewise
        """Go on from a checkpoint's state of the loop, which has that of all stages."""


def stages_of(plan: Plan) -> list[BatchStage]:
    """Make the stages of a plan, in their order."""
    return [resolve(planned.stage)(plan, planned) for planned in plan.stages]
