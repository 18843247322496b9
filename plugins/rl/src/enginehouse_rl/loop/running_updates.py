"""The updates of a step's roles: what each is trained on, and what comes of it."""

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
    """What a step trains a role on; as the arguments of `TrainWorker.update`.

    Attributes:
        batch: rows.
        loss: what to minimise.
        minibatches: optimizer steps a pass.
        epochs: passes over the batch.
        first_loss: instead of `loss` in the first optimizer step.
    """

    batch: Batch | DistributedBatch
    loss: LossSpec
    minibatches: int = 1
    epochs: int = 1
    first_loss: LossSpec | None = None

    def begin(self, group: WorkerGroup) -> Future:
        """Begin it in a role's workers."""
        dealt = Balanced(self.batch, by="input_ids")
        return group.call("update", dealt, self.loss, self.minibatches, self.epochs, self.first_loss, blocking=False)


class RunningUpdates:
    """The updates of one step, under way in the workers of the roles.

    Attributes:
        futures: what each role's workers return.
        metrics: of the step, as far as they do not come of the updates; None: they are not known yet.
        seconds: how long the updates took, once `result` was called.
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
        """Return the metrics of the updates alone, once all have ended, by `until` of `time.monotonic()`; all but the
        actor's begin with the role's name: `critic/loss`, `busy/update/critic`."""
        figures: dict[str, float] = {}
        for role, future in self.futures.items():
            for name, value in metric_values(future.result(seconds_left(until))).items():
                figures[name if role == "actor" else _add_role(name, role)] = value
        return figures


def _add_role(name: str, role: str) -> str:
    return f"{name}/{role}" if name.startswith("busy/") else f"{role}/{name}"
