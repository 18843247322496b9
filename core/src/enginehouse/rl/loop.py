"""What every loop does around its steps: start workers, log, save, tell observers, and end in order however it ends."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.controller import WorkerGroup
from enginehouse.controller.future import Future
from enginehouse.controller.interruption import interrupt_put_off
from enginehouse.data.digests import data_digests
from enginehouse.plugin import capabilities, plugins
from enginehouse.rl.checkpointing import Checkpointing, Standing
from enginehouse.rl.samples import plain
from enginehouse.rl.stalls import Stalls

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan, SFTPlan
    from enginehouse.config.resume import Checkpoint
    from enginehouse.config.schema import Config, SFTConfig
    from enginehouse.data import Batch
    from enginehouse.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

INTERRUPT_SAVE_SECONDS = 4.0
"""How long an interrupted run tries to save the model, and a checkpoint to go on from, before it leaves."""


class Loop(ABC):
    """A loop over steps that trains the actor.

    A run is resumed exactly: what a step does depends on the actor's state, on the loop's own (`state`) and on the
    number of the step, and on nothing else. Both are in a checkpoint.

    Args:
        plan: a config that was checked against plugins, data and model, and a checkpoint to go on from.
        run: the run directory everything is written to.
        progress: where progress is shown.

    Attributes:
        trained_step: the last step whose update was begun; the step resumed from before there is one.
    """

    actor: WorkerGroup
    checkpointing: Checkpointing
    config: Config | SFTConfig

    def __init__(self, plan: Plan | SFTPlan, run: RunDirectory, progress: Progress):
        self.run_directory, self.progress, self.clock = run, progress, run.clock
        self.config = plan.config
        self.steps = plan.config.train.steps
        self.checkpoint_every = plan.config.train.checkpoint_every
        self._data = data_digests(plan.config.data.train)  # just before they are read
        self.save_every = 0
        self.resumed = plan.resumed
        self.stalls = Stalls()
        self.trained_step = plan.resumed.step if plan.resumed else 0
        self._standing: Standing | None = None
        self._update: tuple[Future, Mapping[str, float]] | None = None

    @abstractmethod
    def workers(self) -> AbstractContextManager[Any]:
        """Start the workers, `actor` among them; end them on the way out."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """What each role runs on, for the run's record; plain data."""

    def before_first_step(self) -> None:  # noqa: B027 - a loop may leave it out
        """Called when the workers are up and the actor's state is that of the step resumed from."""

    @abstractmethod
    def run_step(self, step: int) -> Mapping[str, float]:
        """Run one step and return its metrics, `tokens` among them. Called through `enginehouse_run_step`."""

    def after_step(self, step: int) -> None:  # noqa: B027 - a loop may leave it out
        """Called once a step's metrics are written."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The loop's own state as of the update that is about to begin, as plain data; for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Called before there are workers.

        Raises:
            DataError: the data are not those the state is of.
        """

    def run(self) -> None:
        """Run every step that is left, then save the model.

        Raises:
            EnginehouseError: whatever ended the run; what was written until then is kept.
            KeyboardInterrupt: after the workers were ended in order and, if there was time, model and state saved.
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
            self.run_directory.checkpoints.clear_partial()
            plugins().observe("run_finished", run=self, outcome=outcome)

    def update(self, step: int, known: Mapping[str, float], batch: Batch, *how: Any) -> dict[str, float]:
        """Train the actor on a step's batch, and return the step's metrics as far as they are there then.

        A step has to train by this, once: it is how a checkpoint knows where the loop stands.

        Args:
            step: the step. Once this is called, the actor's state is, or soon will be, that of this step.
            known: metrics of the step that are known before.
            batch: what to train on.
            how: further arguments of `TrainWorker.update`.
        """
        standing = Standing(step, self.state())
        self.trained_step = step
        with interrupt_put_off():  # an update is begun and known to be, or not begun; inline: ended
            future = self.actor.call("update", batch, *how, blocking=False)
            self._standing, self._update = standing, (future, known)
        return {**known, **plain(future.result())}

    def save(self, step: int, timeout: float | None = None) -> None:
        """Export the actor's model as a Hugging Face directory; whole or not at all."""
        staged = self.run_directory.model_path(step)
        self.actor.call("export_hf", str(staged), timeout=timeout)
        self._saved(step, self.run_directory.model_saved(step, staged), "model")

    def _run_steps(self) -> None:
        self.run_directory.describe(self.describe())
        background = capabilities.BACKGROUND_SAVE in self._backend_capabilities()
        self.checkpointing = Checkpointing(
            self.actor,
            self.run_directory,
            self.config,
            background,
            lambda step, path: self._saved(step, path, "state"),
            self._data,
        )
        if self.resumed is not None:
            self._load(self.resumed)
        self.progress.remember(self.run_directory.earlier)
        self.before_first_step()
        plugins().observe("run_started", run=self)
        self.progress.start(self.steps, self.trained_step)
        for step in range(self.trained_step + 1, self.steps + 1):
            with self.clock.step(step):
                metrics = dict(plugins().run_step(self, step))
            metrics |= self.clock.metrics()
            metrics["tokens_per_second"] = metrics.pop("tokens", 0.0) / metrics["time/step"]
            self._log(step, metrics)
            self.stalls.look(step, metrics)
            self.after_step(step)
            self._save_where_due(step)
        if self.run_directory.saved_step != self.steps:
            self.save(self.steps)
        self.checkpointing.finish()

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self.actor.load(str(checkpoint.actor))
        except Exception:
            self.run_directory.checkpoints.newest_step = None  # nobody is told to go on from it
            log.warning(
                "%s could not be loaded, and --resume would try it again. If it is damaged, delete it: the run then "
                "goes on from the one before",
                checkpoint.path,
            )
            raise

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run_directory.log(step, metrics)
        self.progress.update(step, metrics)
        plugins().observe("step_finished", run=self, step=step, metrics=metrics)

    def _save_where_due(self, step: int) -> None:
        if self.save_every and step % self.save_every == 0:
            self.save(step)
        every, standing = self.checkpoint_every, self._standing
        if every and (step == self.steps or step % every == 0):
            if standing is None or standing.step != step:
                log.warning("no checkpoint of step %d: it did not train the actor by `Loop.update`", step)
                return
            with self.clock.phase("checkpoint"):
                self.checkpointing.begin(standing)
        self.checkpointing.look()

    def _save_before_leaving(self) -> None:
        """Save metrics, model and state as of the last update that was begun, once it has ended."""
        if self._standing is None or self._update is None:
            return
        until, step = time.monotonic() + INTERRUPT_SAVE_SECONDS, self._standing.step
        try:
            future, known = self._update
            updated = plain(future.result(INTERRUPT_SAVE_SECONDS))
            if self.run_directory.last_step != step:
                metrics = {**known, **updated}
                metrics.pop("tokens", None)
                self._log(step, metrics)
            if self.run_directory.saved_step != step:
                self.save(step, timeout=max(until - time.monotonic(), 0.1))
            self.checkpointing.write_last(self._standing, max(until - time.monotonic(), 0.1))
        except Exception as error:  # whatever it is, the run ends because it was interrupted
            log.warning("not everything was saved: %s", error)

    def _saved(self, step: int, path: Path, what: str) -> None:
        plugins().observe("checkpoint_saved", run=self, step=step, path=str(path), what=what)

    def _backend_capabilities(self) -> frozenset[str]:
        return plugins().get("train", self.config.actor.engine.backend, elsewhere=True).capabilities
