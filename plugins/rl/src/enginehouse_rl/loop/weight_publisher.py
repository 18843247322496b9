"""The weights that the rollout serves: which version, and when the next one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse_rl.loop.running_updates import RunningUpdates
    from enginehouse_rl.loop.trainer import Trainer

SHORT_UPDATE_SECONDS = 1.0
"""After an update that took less, the weights of the next one are asked for before it has ended."""


class WeightPublisher:
    """Brings the actor's weights to every rollout replica, verified, as one version after another.

    Args:
        run: the run, whose roles are there once its workers are up.

    Attributes:
        version: the version that is served, or asked for; 0 before the first.
    """

    def __init__(self, run: Trainer):
        self._run, self._asks_early = run, False
        self._overlaps = bool(run.plan.config.train.staleness)
        self.version = 0

    @contextmanager
    def give_up_on_errors(self) -> Iterator[None]:
        """Within, an error gives up an update of the weights that was begun."""
        try:
            yield
        except BaseException:
            self._run.roles.sync.give_up()
            raise

    def begin(self) -> None:
        """Ask for the weights of a training that has just begun, if the one before took so little time that it pays.

        With `train.staleness` replicas draw meanwhile. Where an update takes long nothing is gained, and who asks a
        replica by itself would wait for it.
        """
        if self._asks_early:
            self._run.roles.sync.begin(self.version + 1)

    def publish(self, training: RunningUpdates | None = None) -> dict[str, float]:
        """Have the actor's weights served as the next version, after a training or before the first; returns figures
        of it."""
        if training is not None:
            self._asks_early = not self._overlaps and training.seconds < SHORT_UPDATE_SECONDS
        roles = self._run.roles
        self.version += 1
        report = roles.sync.publish(self.version, "keep" if self._overlaps else "wait")
        self._run.run_directory.tell("weights_updated", version=report.version, seconds=report.seconds)
        mib = {"": report.nbytes, "_moved": report.bytes_moved, "_minimum": report.bytes_minimum}
        metrics = {f"weights/mib{name}": None if nbytes is None else nbytes / 2**20 for name, nbytes in mib.items()}
        metrics |= {"weights/effect": report.effect, "weights/taken": report.taken}
        metrics |= {"weights/least_taken": report.least_taken, **roles.turns.metrics()}
        return {name: value for name, value in metrics.items() if value is not None}
