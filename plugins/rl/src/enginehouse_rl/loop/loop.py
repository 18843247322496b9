"""What every loop does around its steps: start workers, log, save, tell observers, and end in order however it ends."""

from __future__ import annotations

import gc
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from enginehouse.controller.interruption import defer_interrupt
from enginehouse.plugin import capabilities, plugins
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
"""So many more objects there are before the garbage collector looks for cycles among the new ones: a step makes as
many, and nearly all go without it."""


@contextmanager
def reduce_garbage_collection() -> Iterator[None]:
    """Within, the garbage collector does not look at what is there by now, some 300,000 objects of libraries, nor as
    often at the rest: it took a twentieth of what the controller computes."""
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
    """A loop over steps that trains the actor, and maybe other roles beside it.

    A run is resumed exactly: what a step does depends on the state of the roles that are trained, on the loop's own
    (`state`) and on the number of the step, and on nothing else. Both are in a checkpoint.

    Args:
        plan: a config that was checked against plugins, data and model, and a checkpoint to go on from.
        run: the run directory everything is written to.
        progress: where progress is shown.

    Attributes:
        trained_step: the last step whose update was begun; the step resumed from before there is one.
        loop_state: the state of the loop as of that update; None before there is one.
        training: the updates of that step; None where only those of some roles were begun.
        actor_update: the last step whose update of the actor was begun, and that update.
        exports: writes the actor's model.
        final_save: saves what there is before the run ends, however it does.
    """

    roles: Roles
    checkpoint_writer: CheckpointWriter
    phases: ClassVar[tuple[str, ...]] = ()
    """Phases of which each step has figures, whether or not it does something in them."""

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
        """Read the data, and make what a run has before there are workers."""

    @abstractmethod
    def workers(self) -> AbstractContextManager[Any]:
        """Start the workers as `roles`; end them on the way out."""

    def describe(self) -> Mapping[str, Any]:
        """What each role runs on, for the run's record; plain data."""
        return self.roles.describe()

    def before_first_step(self) -> None:  # noqa: B027 - a loop may leave it out
        """Called when the workers are up and the actor's state is that of the step resumed from."""

    @abstractmethod
    def run_step(self, step: int) -> Mapping[str, float]:
        """Run one step and return its metrics, `tokens` among them. Called through `enginehouse_run_step`."""

    def after_step(self, step: int) -> None:  # noqa: B027 - a loop may leave it out
        """Called once a step's metrics are written."""

    def finish_beside(self, before: int | None = None, seconds: float | None = None) -> None:  # noqa: B027 - likewise
        """End what is under way beside the steps: no later state is saved before it, as a run that goes on from there
        could not do it again.

        Args:
            before: only what is of an earlier step than this one.
            seconds: for so long, at most, and what takes longer is lost; None: any.
        """

    def validates(self, step: int) -> bool:
        """True if what was held out is looked at after this step."""
        every = self.config.train.validate_every
        return step == self.steps or bool(every and step % every == 0)

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
            EnginehouseError: whatever ended the run; what was written until then is kept. State and model are saved
                first, where the actor lives and the error does not say that its state is at fault (`keeps_state`).
            KeyboardInterrupt: after state and model were saved, as far as there was time (`seconds_to_end`), and the
                workers ended.
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
        """Begin to train roles on a step's batch. Within, while they train, the step's other metrics are noted in what
        this gives, and what else there is to do is done; an interrupt waits for that.

        A step has to train by this, once: it is how a checkpoint knows where the loop stands.

        Args:
            step: the step. Once this is called, the state of these roles is, or soon will be, that of this step.
            updates: of each role that is trained, at least one.
        """
        state = LoopState(step, self.state())
        self.trained_step = step
        with defer_interrupt():  # an update is begun and known to be, or not begun; inline: ended
            training = RunningUpdates()
            for role, update in updates.items():
                if training.futures:  # from here on an earlier step's state is nobody's, and this one's not yet
                    self.training = None
                training.futures[role] = update.begin(self.roles.groups[role])
                if role == "actor":
                    self.actor_update = step, training.futures[role]
            self.loop_state, self.training = state, training
            yield training

    def update(self, step: int, update: Update, metrics: Mapping[str, float]) -> dict[str, float]:
        """Train the actor alone, and return the step's metrics: these, and those of the update."""
        with self.updating(step, {"actor": update}) as training:
            training.metrics = metrics
        return training.result()

    def _run_steps(self) -> None:
        described = self.describe()
        self.run_directory.record.update(roles=described)
        self.progress.roles = [f"{role} {len(of)}x {of[0].get('backend', '')}" for role, of in described.items() if of]
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
            self.run_directory.checkpoints.newest_step = None  # nobody is told to go on from it
            log.warning(
                "%s could not be loaded, and --resume would try it again. If it is damaged, delete it: the run then "
                "goes on from the one before",
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
                log.warning("no checkpoint of step %d: it did not train the actor by `Loop.updating`", step)
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
