"""Decides which weight version the rollout serves, and when the rollout asks for the next version."""

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
"""If an update is shorter than this, the weights of the next update are requested before that update has ended."""


class WeightPublisher:
    """Brings the actor's weights to every rollout replica as verified, consecutive versions.

    `version` is the version that is served or requested; 0 before the first update.
    """

    def __init__(self, run: Trainer):
        self._run, self._asks_early = run, False
        self._overlaps = bool(run.plan.config.train.staleness)
        self.version = 0

    @property
    def _pause(self) -> PauseMode:
        """Treatment of running requests: `"keep"` or `"keep_cache"` if requests may be running and the engine can keep
        them, else `"wait"`."""
        if self._run.plan.config.rollout.cache_at_update == "keep":
            return "keep_cache"
        backend = self._run.roles.plans["rollout"].backend
        keeps = PAUSE_KEEP in plugins().get("rollout", backend, elsewhere=True).capabilities
        return "keep" if self._overlaps and keeps else "wait"

    @contextmanager
    def give_up_on_errors(self) -> Iterator[None]:
        """If an error leaves the context, give up a weight update that has begun."""
        try:
            yield
        except BaseException:
            self._run.roles.sync.give_up()
            raise

    def begin(self) -> None:
        """Request the weights of the update that has just begun, before it ends. This saves time if updates are short.

        Nothing is requested if the previous update was long: little time would be saved, and clients of a replica's own
        endpoint would have to wait. With `train.staleness` nothing is ever requested early, because replicas generate
        during the update.
        """
        if self._asks_early:
            self._run.roles.sync.begin(self.version + 1)

    def publish(self, training: RunningUpdates | None = None) -> dict[str, float]:
        """Let the rollout serve the actor's weights as the next version, and return metrics.

        Args:
            training: The updates that have just ended. None: before the first step.
        """
        if training is not None:
            self._asks_early = not self._overlaps and training.seconds < SHORT_UPDATE_SECONDS
        roles = self._run.roles
        self.version += 1
        report = roles.sync.publish(self.version, pause := self._pause)
        self._run.run_directory.tell("weights_updated", version=report.version, seconds=report.seconds)
        mib = {"": report.nbytes, "_moved": report.bytes_moved, "_minimum": report.bytes_minimum}
        metrics = {f"weights/mib{name}": None if nbytes is None else nbytes / 2**20 for name, nbytes in mib.items()}
        metrics |= {"time/stopped": report.stopped, "weights/effect": report.effect, "weights/taken": report.taken}
        metrics |= {"weights/least_taken": report.least_taken, **roles.turns.metrics()}
        metrics[f"rollout/{'kept' if pause == 'keep_cache' else 'recomputed'}_tokens"] = report.interrupted_tokens
        return {name: value for name, value in metrics.items() if value is not None}
