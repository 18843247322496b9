"""The updates of a step's roles: their inputs and their results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginehouse.controller import Balanced
from enginehouse.controller.deadlines import seconds_left
from enginehouse.engines.train import metric_values

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch, WorkerGroup
    from enginehouse.controller.future import Future
    from enginehouse.data import Batch
    from enginehouse.engines.train import LossSpec


@dataclass(frozen=True)
class Update:
    """The inputs of a role's update, which are the arguments of `TrainWorker.update`.

    Attributes:
        minibatches: Optimizer steps per pass.
        epochs: Passes over the batch.
        first_loss: Loss of the first optimizer step, if it differs from `loss`.
    """

    batch: Batch | DistributedBatch
    loss: LossSpec
    minibatches: int = 1
    epochs: int = 1
    first_loss: LossSpec | None = None

    def begin(self, group: WorkerGroup) -> Future:
        dealt = Balanced(self.batch, by="input_ids")
        return group.call("update", dealt, self.loss, self.minibatches, self.epochs, self.first_loss, blocking=False)


class RunningUpdates:
    """The updates of one step, which the workers of the roles are performing.

    Attributes:
        futures: Futures of the results, by role.
        metrics: Metrics of the step that do not come from the updates; None if they are not known yet.
        seconds: Duration of the updates in seconds, once `result` has returned.
    """

    def __init__(self) -> None:
        self.futures: dict[str, Future] = {}
        self.metrics: Mapping[str, float] | None = None
        self.seconds = 0.0
        self._begun = time.perf_counter()

    def result(self) -> dict[str, float]:
        """Wait for the updates, and return the metrics of the step."""
        figures = self.await_metrics(None)
        self.seconds = time.perf_counter() - self._begun
        return {**(self.metrics or {}), **figures}

    def await_metrics(self, until: float | None) -> dict[str, float]:
        """Wait until all updates have ended, at most until `time.monotonic()` is `until`, and return their metrics.

        Metrics of roles besides the actor contain the role's name: `critic/loss`, `busy/update/critic`.
        """
        figures: dict[str, float] = {}
        for role, future in self.futures.items():
            for name, value in metric_values(future.result(seconds_left(until))).items():
                figures[name if role == "actor" else _add_role(name, role)] = value
        return figures


def _add_role(name: str, role: str) -> str:
    return f"{name}/{role}" if name.startswith("busy/") else f"{role}/{name}"
