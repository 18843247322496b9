"""The part that all loops share: starting workers, running steps, logging, saving, notifying observers, ending."""

from __future__ import annotations

import gc
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from enginehouse.controller.interruption import defer_interrupt
from enginehouse.plugin import capabilities, plugins
from enginehouse.roles.placement import place
from enginehouse_rl.data.digests import data_digests, model_digest
from enginehouse_rl.loop.alarm_inputs import read_alarm_inputs
from enginehouse_rl.loop.alarms import Alarms
from enginehouse_rl.loop.checkpoint_writer import CheckpointWriter, LoopState
from enginehouse_rl.loop.exports import Exports
from enginehouse_rl.loop.final_save import FinalSave
from enginehouse_rl.loop.profiles import Profiles
from enginehouse_rl.loop.running_updates import RunningUpdates
from enginehouse_rl.plan.roles import list_model_paths
from enginehouse_rl.runs.observer import PluginHooks

if TYPE_CHECKING:
    from enginehouse.controller.future import Future
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.checkpoints import Checkpoint
    from enginehouse_rl.loop.running_updates import Update
    from enginehouse_rl.plan.plan import RunPlan
    from enginehouse_rl.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

NEW_OBJECTS = 10_000
"""Number of new objects after which the garbage collector searches them for cycles. A step creates about that many, and
nearly all of them are freed by their reference counts."""


@contextmanager
def reduce_garbage_collection() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the context, and collect less often.

    Libraries create some 300,000 objects, and collecting them took a twentieth of the controller's CPU time.
    """
    thresholds, others_froze = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        if not others_froze:
            gc.unfreeze()
        gc.set_threshold(*thresholds)


class Loop(ABC):
    """A loop over steps that trains the actor, and other roles if the plan has them.

    A run resumes exactly, because a step depends only on the state of the trained roles, on the loop's own state
    (`state`) and on the number of the step. Checkpoints contain both states.

    Args:
        plan: Checked config, with a checkpoint if the run resumes.

    Attributes:
        trained_step: Last step whose update began; before the first update, the step from which the run resumed.
        loop_state: State of the loop at the update of `trained_step`, or None before the first update.
        training: Updates of `trained_step`, or None if only some of its roles began to train.
        actor_update: Last step in which the actor's update began, and that update.
    """

    roles: Roles
    checkpoint_writer: CheckpointWriter
    phases: ClassVar[tuple[str, ...]] = ()
    """Phases for which each step reports a duration, even if it does nothing in them."""

    def __init__(self, plan: RunPlan, run: RunDirectory, progress: Progress):
        self.plan, self.config = plan, plan.config
        self.run_directory, self.progress, self.clock = run, progress, run.clock
        run.observers += [progress, PluginHooks(self)]
        self.steps = plan.config.train.steps
        self.checkpoint_every = plan.config.train.checkpoint_every
        self._data = data_digests(plan.config.data.train)  # just before they are read
        self._models = {path: model_digest(path) for path in list_model_paths(plan.config)}
        self._next_checkpoint = math.inf  # by `time.monotonic()`
        self.save_every = plan.config.train.save_every
        self.resumed = plan.resumed
        self.trained_step = plan.resumed.step if plan.resumed else 0
        self.exports, self.final_save = Exports(self), FinalSave(self)
        self.loop_state: LoopState | None = None
        self.training: RunningUpdates | None = None
        self.actor_update: tuple[int, Future] | None = None
        self.prepare()
        if plan.resumed:
            self.restore(plan.resumed.loop)

    def prepare(self) -> None:  # noqa: B027 - a loop may leave it out
        """Read the data, and create everything that a run needs before its workers start."""

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Start the workers, set `roles`, and stop the workers when the context ends."""
        with place(self.plan.roles, self.plan.launch, came=self.progress.report_arrival) as self.roles:
            yield

    def describe(self) -> Mapping[str, Any]:
        """Return a description of the processes of each role as plain data, for the run's record."""
        return self.roles.describe()

    def before_first_step(self) -> None:  # noqa: B027 - a loop may leave it out
        """Called before the first step, when the workers run and the actor has the state from which the run resumes."""

    @abstractmethod
    def run_step(self, step: int) -> Mapping[str, float]:
        """Run one step and return its metrics, including `tokens`. Called through `enginehouse_run_step`."""

    def after_step(self, step: int) -> None:  # noqa: B027 - a loop may leave it out
        """Called after a step's metrics are written."""

    def finish_beside(self, before: int | None = None, seconds: float | None = None) -> None:  # noqa: B027 - likewise
        """Finish work that runs beside the steps, such as a validation.

        Called before a later state is saved, because a run that resumes from this state could not repeat the work.

        Args:
            before: Finish only work of steps before this one.
            seconds: Time limit; work that takes longer is lost. None: no limit.
        """

    def validates(self, step: int) -> bool:
        """True if held-out data is evaluated after this step."""
        every = self.config.train.validate_every
        return step == self.steps or bool(every and step % every == 0)

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the loop's own state at the update that is about to begin, as plain data for a checkpoint."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned. Called before the workers start.

        Raises:
            DataError: The state belongs to other data.
        """

    def run(self) -> None:
        """Run all remaining steps, then save the model.

        Raises:
            EnginehouseError: An error ended the run. Files written before remain. State and model are saved first if
                the actor is alive and the error does not mean that its state is wrong (`keeps_state`).
            KeyboardInterrupt: The run was interrupted. State and model were saved as far as time allowed
                (`seconds_to_end`), and the workers stopped.
        """
        outcome = "failed"
        try:
            with self.progress.task("starting workers"), self.workers():
                try:
                    self._run_steps()
                except BaseException as error:
                    self.final_save.save(error)
                    raise
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            self.run_directory.clear_partial()
            self.run_directory.tell("run_finished", outcome=outcome)

    @contextmanager
    def updating(self, step: int, updates: Mapping[str, Update]) -> Iterator[RunningUpdates]:
        """Begin to train roles on a step's batch.

        The code in the context must set the step's other metrics on the yielded updates, and may do other work while
        the roles train. An interrupt takes effect when the context ends. Each step must train through exactly one call
        of this method, because checkpoints learn from it which step the loop has reached.

        Args:
            step: Number of the step. From this call on, the state of the roles counts as the state of this step.
            updates: Update of each trained role; at least one.
        """
        state = LoopState(step, self.state())
        self.trained_step = step
        with defer_interrupt():  # an update that began must be recorded; an inline update has already ended
            training = RunningUpdates()
            for role, update in updates.items():
                if training.futures:  # from here on the roles have states of different steps
                    self.training = None
                training.futures[role] = update.begin(self.roles.groups[role])
                if role == "actor":
                    self.actor_update = step, training.futures[role]
            self.loop_state, self.training = state, training
            yield training

    def update(self, step: int, update: Update, metrics: Mapping[str, float]) -> dict[str, float]:
        """Train only the actor, and return `metrics` together with the metrics of the update."""
        with self.updating(step, {"actor": update}) as training:
            training.metrics = metrics
        return training.result()

    def _run_steps(self) -> None:
        self.run_directory.record.update(roles=self.describe())
        self.checkpoint_writer = CheckpointWriter(
            self.roles.trained,
            self.run_directory,
            self.config,
            self.roles.plans["actor"].model.dtype,
            self._saves_in_background(),
            self._data,
            self._models,
            sum(size for size, _ in self.resumed.files.values()) if self.resumed else None,
        )
        if self.resumed is not None:
            self._load(self.resumed)
        self.progress.remember(self.run_directory.path)
        self.before_first_step()
        self.run_directory.tell("run_started")
        self.progress.start(self.steps, self.trained_step)
        profiles = Profiles(self.config.train.profile_steps, self.run_directory)
        alarms = Alarms(self.run_directory, self.progress, read_alarm_inputs(self.plan))
        self._set_next_checkpoint()
        with reduce_garbage_collection():
            for step in range(self.trained_step + 1, self.steps + 1):
                with profiles.step(step, self.roles), self.clock.step(step, self.phases):
                    metrics = dict(plugins().run_step(self, step))
                metrics |= self.clock.metrics()
                metrics["tokens_per_second"] = metrics.pop("tokens", 0.0) / metrics["time/step"]
                self.log(step, metrics)
                alarms.check(step)
                self.after_step(step)
                self._save_where_due(step)
        if self.run_directory.models.saved_step != self.steps:
            self.exports.save(self.steps)
        self.finish_beside()
        self.checkpoint_writer.finish()

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            for role, group in self.roles.trained.items():
                group.load(str(checkpoint.state_of(role)))
        except Exception:
            self.run_directory.checkpoints.newest_step = None  # so that no message recommends it
            log.warning(
                "%s could not be loaded, and --resume would try it again. If this checkpoint is damaged, delete it: "
                "the run then resumes from the previous checkpoint",
                checkpoint.path,
            )
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run_directory.log(step, metrics)

    def _save_where_due(self, step: int) -> None:
        if self.save_every and step % self.save_every == 0:
            self.exports.save(step)
        every, state = self.checkpoint_every, self.loop_state
        late = time.monotonic() >= self._next_checkpoint and step < self.steps
        if late or (every and (step == self.steps or step % every == 0)):
            self._set_next_checkpoint()
            if state is None or state.step != step:
                log.warning(
                    "no checkpoint of step %d, because the step did not train the actor through `Loop.updating`", step
                )
                return
            self.finish_beside(step)
            with self.clock.phase("checkpoint"), self.roles.turns.on_devices():
                self.checkpoint_writer.begin(state)
            self._set_next_checkpoint()
        self.checkpoint_writer.publish_if_written()

    def _set_next_checkpoint(self) -> None:
        if minutes := self.config.train.checkpoint_minutes:
            self._next_checkpoint = time.monotonic() + 60.0 * minutes

    def _saves_in_background(self) -> bool:
        backends = [self.roles.plans[role].backend for role in self.roles.trained]
        records = [plugins().get("train", backend, elsewhere=True) for backend in backends]
        return all(capabilities.BACKGROUND_SAVE in record.capabilities for record in records)
