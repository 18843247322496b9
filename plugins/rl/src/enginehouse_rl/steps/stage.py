"""A stage of a step adds columns to the batch of the step's samples, or changes columns.

The plan (`enginehouse_rl.plan.stages`) chooses and orders the stages of a run.
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
        planned: The plan of the stage, with the columns that it needs and adds.

    Attributes:
        phase: The phase of a step in which the stage's seconds are counted.
        scores: True if the sample metrics use the reward as it is after this stage.
    """

    phase: str
    scores = False

    def __init__(self, plan: Plan, planned: StagePlan):
        self.plan, self.planned = plan, planned
        self.figures: Mapping[str, float] = {}

    def begin(self, batch: DistributedBatch, roles: Roles) -> None:  # noqa: B027 - a stage may leave it out
        """Begin work that does not depend on other stages, so that it runs while earlier stages run."""

    @abstractmethod
    def __call__(self, batch: DistributedBatch, roles: Roles) -> DistributedBatch:
        """Return the batch with the stage's columns."""

    def state(self) -> dict[str, Any]:
        """Return the stage's state for a checkpoint, as plain data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - likewise
        """Restore the stage from the loop state of a checkpoint, which contains the states of all stages."""


def make_stages(plan: Plan) -> list[BatchStage]:
    return [resolve(planned.stage)(plan, planned) for planned in plan.stages]
