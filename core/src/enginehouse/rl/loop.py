"""What every loop does around its steps: start workers, log, save, tell observers, and end in order however it ends."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from enginehouse.controller import WorkerGroup
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import plugins

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan, SFTPlan
    from enginehouse.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

INTERRUPT_SAVE_SECONDS = 2.0
"""How long an interrupted run tries to save the model before it leaves."""


class Loop(ABC):
    """A loop over steps that trains the actor.

    Args:
        plan: a config that was checked against plugins, data and model.
        run: the run directory everything is written to.
        progress: where progress is shown.

    Attributes:
        trained_step: the last step whose update was begun.
    """

    actor: WorkerGroup

    def __init__(self, plan: Plan | SFTPlan, run: RunDirectory, progress: Progress):
        self.run_directory, self.progress, self.clock = run, progress, run.clock
        self.steps = plan.config.train.steps
        self.save_every = 0
        self.trained_step = 0

    @abstractmethod
    def workers(self) -> AbstractContextManager[Any]:
        """Start the workers, `actor` among them; end them on the way out."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What each role runs on, for the run's record; plain data."""

    def before_first_step(self) -> None:  # noqa: B027 - a loop may leave it out
        """Called when the workers are up."""

    @abstractmethod
    def run_step(self, step: int) -> Mapping[str, float]:
        """Run one step and return its metrics, `tokens` among them. Called through `enginehouse_run_step`."""

    def after_step(self, step: int) -> None:  # noqa: B027 - a loop may leave it out
        """Called once a step's metrics are written."""

    def run(self) -> None:
        """Run every step, then save the model.

        Raises:
            EnginehouseError: whatever ended the run; what was written until then is kept.
            KeyboardInterrupt: after the workers were ended in order and, if there was time, the model saved.
        """
        outcome = "failed"
        try:
            with self.progress.task("starting workers"), self.workers():
                try:
                    self._run_steps()
                except KeyboardInterrupt:
                    self._save_before_leaving()
                    raise
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            plugins().observe("run_finished", run=self, outcome=outcome)

    def save(self, step: int, timeout: float | None = None) -> None:
        """Export the actor's model as a Hugging Face directory; whole or not at all."""
        staged = self.run_directory.model_path(step)
        self.actor.call("export_hf", str(staged), timeout=timeout)
        path = self.run_directory.model_saved(step, staged)
        plugins().observe("checkpoint_saved", run=self, step=step, path=str(path))

    def _run_steps(self) -> None:
        self.run_directory.describe(self.describe())
        self.before_first_step()
        plugins().observe("run_started", run=self)
        self.progress.start(self.steps)
        for step in range(1, self.steps + 1):
            with self.clock.step(step):
                metrics = dict(plugins().run_step(self, step))
            metrics |= self.clock.metrics()
            metrics["tokens_per_second"] = metrics.pop("tokens", 0.0) / metrics["time/step"]
            self.run_directory.log(step, metrics)
            self.progress.update(step, metrics)
            plugins().observe("step_finished", run=self, step=step, metrics=metrics)
            self.after_step(step)
            if step == self.steps or (self.save_every and step % self.save_every == 0):
                self.save(step)

    def _save_before_leaving(self) -> None:
        """Save the model as of the last update that was begun: the export waits for it to end."""
        if self.trained_step and self.trained_step != self.run_directory.saved_step:
            try:
                self.save(self.trained_step, timeout=INTERRUPT_SAVE_SECONDS)
            except EnginehouseError as error:
                log.warning("the model was not saved: %s", error)
