"""What every loop does around its steps: start workers, log, save, tell observers, and end in order however it ends."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.controller import Balanced
from enginehouse.controller.deadlines import seconds_left
from enginehouse.controller.errors import keeps_state
from enginehouse.controller.future import Future, StillRunning
from enginehouse.controller.interruption import interrupt_put_off, seconds_to_end
from enginehouse.controller.ray_access import ray_access
from enginehouse.engines.train import metric_values
from enginehouse.errors import SaveError, SaveTooLate, first_line
from enginehouse.plugin import capabilities, plugins
from enginehouse.roles.turns import PARAMS
from enginehouse_rl.alarms import Alarms, Watched
from enginehouse_rl.checkpoint_writer import CheckpointWriter, LoopState, bytes_in, writing
from enginehouse_rl.config.roles import model_paths
from enginehouse_rl.data.digests import data_digests, model_digest
from enginehouse_rl.exported import compare_export, name_ends
from enginehouse_rl.profiles import Profiles

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch, WorkerGroup
    from enginehouse.data import Batch
    from enginehouse.engines.train import LossSpec
    from enginehouse.roles.placement import Roles
    from enginehouse_rl.checkpoints import Checkpoint
    from enginehouse_rl.config.plan import RunPlan
    from enginehouse_rl.config.schema import AnyConfig
    from enginehouse_rl.runs import Progress, RunDirectory

log = logging.getLogger(__name__)

ENDING_SECONDS = 6.0
"""Of the grace of an interrupted run, what is kept for ending its processes; at most a third of it."""
EXPORTS = {"merged": "export_hf", "adapter": "export_adapter"}
"""By kind, the method that writes it; `train.export` says which."""
LOST_SECONDS = 45.0
"""Longest time for saving once Ray's control service is gone: Ray ends the program a minute after it."""


NEW_OBJECTS = 10_000
"""So many more objects there are before the garbage collector looks for cycles among the new ones: a step makes as
many, and nearly all go without it."""


@contextmanager
def garbage_collected_less() -> Iterator[None]:
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
    """

    roles: Roles
    checkpoint_writer: CheckpointWriter
    config: AnyConfig

    def __init__(self, plan: RunPlan, run: RunDirectory, progress: Progress):
        self.run_directory, self.progress, self.clock = run, progress, run.clock
        self.config = plan.config
        self.steps = plan.config.train.steps
        self.checkpoint_every = plan.config.train.checkpoint_every
        self._data = data_digests(plan.config.data.train)  # just before they are read
        self._models = {path: model_digest(path) for path in model_paths(plan.config)}
        self._next_checkpoint = math.inf  # by `time.monotonic()`
        grace = plan.config.run.grace_seconds
        self._grace = grace - min(ENDING_SECONDS, grace / 3)
        self.save_every = plan.config.train.save_every
        self.resumed = plan.resumed
        self.trained_step = plan.resumed.step if plan.resumed else 0
        self._candidate: Path | None = None  # for `models/best`
        self._compared: set[str] = set()  # kinds of exports
        self._loop_state: LoopState | None = None
        self._update: tuple[Mapping[str, Future], Mapping[str, float] | None] | None = None
        self._actor_update: tuple[int, Future] | None = None

    @abstractmethod
    def workers(self) -> AbstractContextManager[Any]:
        """Start the workers as `roles`; end them on the way out."""

    def describe(self) -> Mapping[str, Any]:
        """What each role runs on, for the run's record; plain data."""
        return self.roles.describe()

    def before_first_step(self) -> None:  # noqa: B027 - a loop may leave it out
        """Called when the workers are up and the actor's state is that of the step resumed from."""

    def watched(self) -> Watched:
        """What alarms have to know of the run."""
        return Watched()

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
                    self._save_before_leaving(error)
                    raise
            outcome = "finished"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            self.run_directory.clear_partial()
            plugins().observe("run_finished", run=self, outcome=outcome)

    def update(
        self,
        step: int,
        updates: Mapping[str, Update],
        meanwhile: Callable[[], Mapping[str, float]],
        then: Callable[[], object] = lambda: None,
    ) -> dict[str, float]:
        """Train roles on a step's batch, and return the step's metrics as far as they are there then.

        A step has to train by this, once: it is how a checkpoint knows where the loop stands.

        Args:
            step: the step. Once this is called, the state of these roles is, or soon will be, that of this step.
            updates: of each role that is trained, at least one.
            meanwhile: what else there is to do, called once the updates are under way; returns the step's metrics, as
                far as they do not come of them.
            then: what to do after that, still meanwhile; if it fails, the step's metrics are known all the same.

        Returns:
            `meanwhile`'s metrics and those of `TrainWorker.update`; all but the actor's begin with the role's name:
            `critic/loss`, `busy/update/critic`.
        """
        state = LoopState(step, self.state())
        self.trained_step = step
        with interrupt_put_off():  # an update is begun and known to be, or not begun; inline: ended
            futures: dict[str, Future] = {}
            for role, one in updates.items():
                if futures:  # from here on an earlier step's state is nobody's, and this one's not yet
                    self._update = None
                futures[role] = one.begin(self.roles.groups[role])
                if role == "actor":
                    self._actor_update = step, futures[role]
            self._loop_state, self._update = state, (futures, None)
            metrics = meanwhile()
            self._update = futures, metrics
            then()
        return {**metrics, **_figures(futures, None)}

    def save(self, step: int, timeout: float | None = None) -> None:
        """Export the actor's model as a Hugging Face directory; whole or not at all."""
        staged = self._exported(step, self.run_directory.model_path(step), timeout)
        with writing(f"the model of step {step}", staged):
            place = self.run_directory.model_saved(step, staged)
        self._saved(step, place, "model")

    def save_best(self, step: int, metric: str, value: float) -> None:
        """As `save`, to `models/best`; if the validation of `step` measured more than that of the model there. A model
        that was kept for it (`keep_best_candidate`) is taken, or deleted."""
        staged, self._candidate = self._candidate, None
        if not self.run_directory.is_best(metric, value):
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)
            return
        if staged is None:
            staged = self._exported(step, self.run_directory.best_path())
        with writing(f"the model of step {step}", staged):
            place = self.run_directory.best_saved(step, staged, metric, value)
        self._saved(step, place, "model")

    def keep_best_candidate(self, step: int) -> None:
        """Export the actor's model for `save_best`, which is called once later steps have trained the actor."""
        self._candidate = self._exported(step, self.run_directory.best_path())

    def _exported(self, step: int, staged: Path, timeout: float | None = None) -> Path:
        kinds = {kind: staged for kind in ("merged", "adapter") if self.config.train.export in (kind, "both")}
        if len(kinds) == 2:
            kinds["adapter"] = staged / "adapter"
        saved = self.run_directory.saved_model
        expected = None if saved is None else bytes_in(saved)
        with self.roles.turns.on_devices(PARAMS):
            with writing(f"the model of step {step}", staged, hurried=timeout is not None, expected=expected):
                for kind, place in kinds.items():
                    self.roles.actor.call(EXPORTS[kind], str(place), timeout=timeout)
                if "merged" in kinds and staged.is_dir():
                    name_ends(staged, self.roles.plans["actor"].model)
            for kind in kinds.keys() - self._compared:
                if timeout is None and staged.is_dir():  # after SIGTERM there is no time for it
                    self._compare(kind, kinds[kind], staged)
        return staged

    def _compare(self, kind: str, place: Path, staged: Path) -> None:
        """Compare the first export of a kind with what was trained, and say where that cannot be done.

        Raises:
            ExportDiffers: they differ; what was `staged` is deleted.
        """
        try:
            why_not = compare_export(place, self.roles.actor, self.roles.plans["actor"].model)
        except Exception:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        if why_not:
            what = "adapter" if kind == "adapter" else "model"
            self.progress.note(f"the exported {what} was not compared with the trained one: {why_not}")
        self._compared.add(kind)

    def _run_steps(self) -> None:
        described = self.describe()
        self.run_directory.describe(described)
        self.progress.roles = [f"{role} {len(of)}x {of[0].get('backend', '')}" for role, of in described.items() if of]
        self.checkpoint_writer = CheckpointWriter(
            self.roles.trained,
            self.run_directory,
            self.config,
            self.roles.plans["actor"].model.dtype,
            self._saves_in_background(),
            lambda step, path: self._saved(step, path, "state"),
            self._data,
            self._models,
            sum(size for size, _ in self.resumed.files.values()) if self.resumed else None,
        )
        if self.resumed is not None:
            self._load(self.resumed)
        self.progress.remember(self.run_directory.earlier)
        self.before_first_step()
        plugins().observe("run_started", run=self)
        self.progress.start(self.steps, self.trained_step)
        profiles = Profiles(self.config.train.profile_steps, self.run_directory)
        alarms = Alarms(self.run_directory, self.progress, self.watched())
        self._set_next_checkpoint()
        with garbage_collected_less():
            for step in range(self.trained_step + 1, self.steps + 1):
                with profiles.step(step, self.roles), self.clock.step(step):
                    metrics = dict(plugins().run_step(self, step))
                metrics |= self.clock.metrics()
                metrics["tokens_per_second"] = metrics.pop("tokens", 0.0) / metrics["time/step"]
                self._log(step, metrics)
                alarms.check(step)
                self.after_step(step)
                self._save_where_due(step)
        if self.run_directory.saved_step != self.steps:
            self.save(self.steps)
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

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run_directory.log(step, metrics)
        self.progress.update(step, metrics)
        plugins().observe("step_finished", run=self, step=step, metrics=metrics)

    def _save_where_due(self, step: int) -> None:
        if self.save_every and step % self.save_every == 0:
            self.save(step)
        every, state = self.checkpoint_every, self._loop_state
        late = time.monotonic() >= self._next_checkpoint and step < self.steps
        if late or (every and (step == self.steps or step % every == 0)):
            self._set_next_checkpoint()
            if state is None or state.step != step:
                log.warning("no checkpoint of step %d: it did not train the actor by `Loop.update`", step)
                return
            self.finish_beside(step)
            with self.clock.phase("checkpoint"), self.roles.turns.on_devices():
                self.checkpoint_writer.begin(state)
            self._set_next_checkpoint()
        self.checkpoint_writer.publish_if_written()

    def _set_next_checkpoint(self) -> None:
        if minutes := self.config.train.checkpoint_minutes:
            self._next_checkpoint = time.monotonic() + 60.0 * minutes

    def _save_before_leaving(self, error: BaseException) -> None:
        """Save what there is, in the time there is: a scheduler kills in the end, and so does Ray once it is lost."""
        save = self._save_state if keeps_state(error) else self._save_under_way
        seconds = seconds_to_end(self._grace) if isinstance(error, KeyboardInterrupt) else None
        if ray_access.lost:
            ray_access.carry_on()
            seconds = min(self._grace, LOST_SECONDS)

        def end_within(seconds: float | None) -> None:
            until = None if seconds is None else time.monotonic() + seconds
            if self.roles.turns.taken:
                with self.progress.task("waiting for the rollout to leave the devices to what is saved"):
                    self.roles.turns.end(until)
            save(seconds_left(until), error)
            self._finish_before_leaving(until)

        try:
            end_within(seconds)
        except KeyboardInterrupt:  # of a run that failed: what is left to save is saved all the same
            end_within(seconds_to_end(self._grace) if seconds is None else seconds)
            raise

    def _finish_before_leaving(self, until: float | None) -> None:
        """As `finish_beside`, in the time that is left; a run that failed takes no more of it than one that was
        interrupted."""
        if (state := self._loop_state) is None:  # nothing goes on from here
            return
        left = seconds_left(until)
        try:
            self.finish_beside(state.step, self._grace if left is None else left)
        except Exception as error:
            log.warning("what was under way beside the steps is lost: %s", first_line(error))

    def _save_under_way(self, seconds: float | None, ended_by: BaseException) -> None:
        """Have the checkpoint under way, if there is one: it is of an earlier update than the one that is at fault."""
        if self._loop_state is None:
            return
        try:
            self.checkpoint_writer.finish(seconds)
        except Exception as error:
            log.warning("%s", first_line(error))

    def _save_state(self, seconds: float | None, ended_by: BaseException) -> None:
        """Save metrics, state and model as of the last update that was begun, once it has ended.

        Args:
            seconds: in so many, at most; None: each call has its own limit.
            ended_by: why the run ends.
        """
        if (state := self._loop_state) is None:
            return
        until, step = None if seconds is None else time.monotonic() + seconds, state.step
        if self._update is None:  # of the roles that a step trains, only some were begun
            self._save_under_way(seconds_left(until), ended_by)
            self._save_model_alone(until, ended_by)
            return
        futures, metrics = self._update
        try:
            with self.progress.task(f"waiting for the update of step {step}"):
                figures = _figures(futures, until)
        except Exception as error:
            self._say_unsaved("state", step, error, ended_by)
            self._save_under_way(seconds_left(until), ended_by)
            if not isinstance(error, StillRunning):
                self._save_model_alone(until, ended_by)
            return

        def log_metrics() -> None:
            self._log(step, {name: value for name, value in {**(metrics or {}), **figures}.items() if name != "tokens"})

        parts: dict[str, Callable[[], object]] = {}
        if self.run_directory.last_step != step and metrics is not None:  # half a row is none
            parts["metrics"] = log_metrics
        parts["checkpoint"] = lambda: self.checkpoint_writer.write_last(state, seconds_left(until))
        if self.run_directory.saved_step != step:
            parts["model"] = lambda: self.save(step, timeout=seconds_left(until))
        for what, save in parts.items():
            if what == "model" and self.roles.actor.broken and self.run_directory.checkpoints.newest_step != step:
                break  # it has been said why
            try:
                with self.progress.task(f"saving the {what} of step {step}"):
                    save()
            except Exception as error:  # whatever it is, the run ends because of another thing, and more may be saved
                self._say_unsaved(what, step, error, ended_by)

    def _save_model_alone(self, until: float | None, ended_by: BaseException) -> None:
        """Save the model of the actor's last update where another role's state is lost: nobody can go on from it, but
        use it."""
        if self._actor_update is None:
            return
        step, update = self._actor_update
        try:
            update.result(seconds_left(until))
            if self.run_directory.saved_step != step:
                self.save(step, timeout=seconds_left(until))
        except Exception as error:
            self._say_unsaved("model", step, error, ended_by)

    def _say_unsaved(self, what: str, step: int, error: Exception, ended_by: BaseException) -> None:
        """A warning, unless the error that ended the run says it already."""
        on_disk = (SaveError, OSError)
        same = str(error) == str(ended_by) or (isinstance(error, on_disk) and isinstance(ended_by, on_disk))
        said_already = isinstance(ended_by, Exception) and (same or self.roles.actor.broken is not None)
        level = logging.INFO if said_already else logging.WARNING
        cure = ""
        if isinstance(ended_by, KeyboardInterrupt) and isinstance(error, SaveTooLate | StillRunning):
            cure = f"run.grace_seconds is {self.config.run.grace_seconds:g}, which is too short; raise it: "
        log.log(level, "%sno %s of step %d was saved: %s", cure, what, step, first_line(error))

    def _saved(self, step: int, path: Path, what: str) -> None:
        self.progress.saved(step, str(path), what)
        plugins().observe("checkpoint_saved", run=self, step=step, path=str(path), what=what)

    def _saves_in_background(self) -> bool:
        backends = [self.roles.plans[role].backend for role in self.roles.trained]
        records = [plugins().get("train", backend, elsewhere=True) for backend in backends]
        return all(capabilities.BACKGROUND_SAVE in record.capabilities for record in records)


def _figures(updates: Mapping[str, Future], until: float | None) -> dict[str, float]:
    """The metrics of updates, once all have ended, by `until` of `time.monotonic()`."""
    figures: dict[str, float] = {}
    for role, future in updates.items():
        for name, value in metric_values(future.result(seconds_left(until))).items():
            figures[name if role == "actor" else _of_role(name, role)] = value
    return figures


def _of_role(name: str, role: str) -> str:
    return f"{name}/{role}" if name.startswith("busy/") else f"{role}/{name}"
