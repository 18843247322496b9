"""What a run saves before it leaves, however it ends: metrics, state and model, in the time there is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from enginehouse.controller.deadlines import seconds_left
from enginehouse.controller.errors import keeps_state
from enginehouse.controller.future import StillRunning
from enginehouse.controller.interruption import seconds_to_end
from enginehouse.controller.ray_access import ray_access
from enginehouse.errors import SaveError, SaveTooLate, first_line

if TYPE_CHECKING:
    from enginehouse_rl.loop.loop import Loop

log = logging.getLogger(__name__)

ENDING_SECONDS = 6.0
"""Of the grace of an interrupted run, what is kept for ending its processes; at most a third of it."""
LOST_SECONDS = 45.0
"""Longest time for saving once Ray's control service is gone: Ray ends the program a minute after it."""


class FinalSave:
    """Saves what there is of a run that an error or an interrupt ends.

    Args:
        run: the run.
    """

    def __init__(self, run: Loop):
        grace = run.config.run.grace_seconds
        self._run, self._grace = run, grace - min(ENDING_SECONDS, grace / 3)

    def save(self, error: BaseException) -> None:
        """Save what there is, in the time there is: a scheduler kills in the end, and so does Ray once it is lost."""
        save = self._save_state if keeps_state(error) else self._save_under_way
        seconds = seconds_to_end(self._grace) if isinstance(error, KeyboardInterrupt) else None
        if ray_access.lost:
            ray_access.carry_on()
            seconds = min(self._grace, LOST_SECONDS)

        def end_within(seconds: float | None) -> None:
            until = None if seconds is None else time.monotonic() + seconds
            if self._run.roles.turns.is_shared:
                with self._run.progress.task("waiting for the rollout to leave the devices to what is saved"):
                    self._run.roles.turns.end(until)
            save(seconds_left(until), error)
            self._finish_beside(until)

        try:
            end_within(seconds)
        except KeyboardInterrupt:  # of a run that failed: what is left to save is saved all the same
            end_within(seconds_to_end(self._grace) if seconds is None else seconds)
            raise

    def _finish_beside(self, until: float | None) -> None:
        """As `finish_beside`, in the time that is left; a run that failed takes no more of it than one that was
        interrupted."""
        if (state := self._run.loop_state) is None:  # nothing goes on from here
            return
        left = seconds_left(until)
        try:
            self._run.finish_beside(state.step, self._grace if left is None else left)
        except Exception as error:
            log.warning("what was under way beside the steps is lost: %s", first_line(error))

    def _save_under_way(self, seconds: float | None, ended_by: BaseException) -> None:
        """Have the checkpoint under way, if there is one: it is of an earlier update than the one that is at fault."""
        if self._run.loop_state is None:
            return
        try:
            self._run.checkpoint_writer.finish(seconds)
        except Exception as error:
            log.warning("%s", first_line(error))

    def _save_state(self, seconds: float | None, ended_by: BaseException) -> None:
        """Save metrics, state and model as of the last update that was begun, once it has ended.

        Args:
            seconds: in so many, at most; None: each call has its own limit.
            ended_by: why the run ends.
        """
        run, state = self._run, self._run.loop_state
        if state is None:
            return
        until, step = None if seconds is None else time.monotonic() + seconds, state.step
        if (training := run.training) is None:  # of the roles that a step trains, only some were begun
            self._save_under_way(seconds_left(until), ended_by)
            self._save_model_alone(until, ended_by)
            return
        metrics = training.metrics
        try:
            with run.progress.task(f"waiting for the update of step {step}"):
                figures = training.await_metrics(until)
        except Exception as error:
            self._report_unsaved("state", step, error, ended_by)
            self._save_under_way(seconds_left(until), ended_by)
            if not isinstance(error, StillRunning):
                self._save_model_alone(until, ended_by)
            return

        def log_metrics() -> None:
            row = {**(metrics or {}), **figures}
            run.log(step, {name: value for name, value in row.items() if name != "tokens"})

        parts: dict[str, Callable[[], object]] = {}
        if run.run_directory.last_step != step and metrics is not None:  # half a row is none
            parts["metrics"] = log_metrics
        parts["checkpoint"] = lambda: run.checkpoint_writer.write_last(state, seconds_left(until))
        if run.run_directory.models.saved_step != step:
            parts["model"] = lambda: run.exports.save(step, timeout=seconds_left(until))
        for what, save in parts.items():
            if what == "model" and run.roles.actor.broken and run.run_directory.checkpoints.newest_step != step:
                break  # it has been said why
            try:
                with run.progress.task(f"saving the {what} of step {step}"):
                    save()
            except Exception as error:  # whatever it is, the run ends because of another thing, and more may be saved
                self._report_unsaved(what, step, error, ended_by)

    def _save_model_alone(self, until: float | None, ended_by: BaseException) -> None:
        """Save the model of the actor's last update where another role's state is lost: nobody can go on from it, but
        use it."""
        if self._run.actor_update is None:
            return
        step, update = self._run.actor_update
        try:
            update.result(seconds_left(until))
            if self._run.run_directory.models.saved_step != step:
                self._run.exports.save(step, timeout=seconds_left(until))
        except Exception as error:
            self._report_unsaved("model", step, error, ended_by)

    def _report_unsaved(self, what: str, step: int, error: Exception, ended_by: BaseException) -> None:
        """A warning, unless the error that ended the run says it already."""
        on_disk = (SaveError, OSError)
        same = str(error) == str(ended_by) or (isinstance(error, on_disk) and isinstance(ended_by, on_disk))
        said_already = isinstance(ended_by, Exception) and (same or self._run.roles.actor.broken is not None)
        level = logging.INFO if said_already else logging.WARNING
        cure = ""
        if isinstance(ended_by, KeyboardInterrupt) and isinstance(error, SaveTooLate | StillRunning):
            cure = f"run.grace_seconds is {self._run.config.run.grace_seconds:g}, which is too short; raise it: "
        log.log(level, "%sno %s of step %d was saved: %s", cure, what, step, first_line(error))
