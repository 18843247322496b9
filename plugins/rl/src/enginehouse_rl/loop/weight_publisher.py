"""The publisher decides which weight version the rollout serves and when it asks for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginehouse.engines.rollout import PauseMode
from enginehouse.plugin import plugins
from enginehouse.plugin.capabilities import PAUSE_KEEP

if TYPE_CHECKING:
    from enginehouse_rl.loop.running_updates import RunningUpdates
    from enginehouse_rl.loop.trainer import Trainer

SHORT_UPDATE_SECONDS = 1.0
"""After a shorter update, in seconds, the weights of the next one are requested before that one has ended."""


class WeightPublisher:
    """Brings the actor's weights to every rollout replica as verified, consecutive versions.

    Attributes:
        version: Version that is served or requested; 0 before the first.
    """

    def __init__(self, run: Trainer):
        self._run, self._asks_early = run, False
        self._overlaps = bool(run.plan.config.train.staleness)
        self.version = 0

    @property
    def _pause(self) -> PauseMode:
        """Treatment of running requests; `"keep"` if there may be any, and the engine offers it."""
        backend = self._run.roles.plans["rollout"].backend
        keeps = PAUSE_KEEP in plugins().get("rollout", backend, elsewhere=True).capabilities
        return "keep" if self._overlaps and keeps else "wait"

    @contextmanager
    def give_up_on_errors(self) -> Iterator[None]:
        """Give up a weight update that began if an error leaves the context."""
        try:
            yield
        except BaseException:
            self._run.roles.sync.give_up()
            raise

    def begin(self) -> None:
        """Request the weights of a training that has just begun, if the previous update was so short that this pays.

        With `train.staleness` replicas generate meanwhile. If updates take long nothing is gained, and clients of a
        replica's own endpoint would have to wait.
        """
        if self._asks_early:
            self._run.roles.sync.begin(self.version + 1)

    def publish(self, training: RunningUpdates | None = None) -> dict[str, float]:
        """Let the rollout serve the actor's weights as the next version, after a training or before the first. Returns
        metrics of the update."""
        if training is not None:
            self._asks_early = not self._overlaps and training.seconds < SHORT_UPDATE_SECONDS
        roles = self._run.roles
        self.version += 1
        report = roles.sync.publish(self.version, self._pause)
        self._run.run_directory.tell("weights_updated", version=report.version, seconds=report.seconds)
        mib = {"": report.nbytes, "_moved": report.bytes_moved, "_minimum": report.bytes_minimum}
        metrics = {f"weights/mib{name}": None if nbytes is None else nbytes / 2**20 for name, nbytes in mib.items()}
        metrics |= {"weights/effect": report.effect, "weights/taken": report.taken}
        metrics |= {"weights/least_taken": report.least_taken, **roles.turns.metrics()}
        return {name: value for name, value in metrics.items() if value is not None}
