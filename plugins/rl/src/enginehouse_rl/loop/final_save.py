"""Saves metrics, state and model before a run ends, for whatever reason, in the time that is left."""

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
"""Seconds of an interrupted run's grace period that are reserved for stopping its processes, but at most a third of the
period."""
LOST_SECONDS = 45.0
"""Time limit, in seconds, for saving once Ray's control service is lost. Ray ends the program a minute later."""


class FinalSave:
    """Saves as much as possible of a run that an error or an interrupt ends."""

    def __init__(self, run: Loop):
        grace = run.config.run.grace_seconds
        self._run, self._grace = run, grace - min(ENDING_SECONDS, grace / 3)

    def save(self, error: BaseException) -> None:
        """Save as much as possible in the time that is left.

        The time is limited, because a scheduler kills an interrupted program after its grace period. Ray also kills the
        program once its cluster is lost.
        """
        save = self._save_state if keeps_state(error) else self._finish_pending
        seconds = seconds_to_end(self._grace) if isinstance(error, KeyboardInterrupt) else None
        if ray_access.lost:
            ray_access.carry_on()
            seconds = min(self._grace, LOST_SECONDS)

        def end_within(seconds: float | None) -> None:
            until = None if seconds is None else time.monotonic() + seconds
            if self._run.roles.turns.is_shared:
                with self._run.progress.task("waiting for the rollout to free the devices for saving"):
                    self._run.roles.turns.end(until)
            save(seconds_left(until), error)
            self._finish_beside(until)

        try:
            end_within(seconds)
        except KeyboardInterrupt:  # a failed run was interrupted: save the rest nevertheless
            end_within(seconds_to_end(self._grace) if seconds is None else seconds)
            raise

    def _finish_beside(self, until: float | None) -> None:
        """Call `finish_beside` with the remaining time. A failed run gets as much time as an interrupted run."""
        if (state := self._run.loop_state) is None:  # no update has begun
            return
        remaining = seconds_left(until)
        try:
            self._run.finish_beside(state.step, self._grace if remaining is None else remaining)
        except Exception as error:
            log.warning("work that ran beside the steps is lost: %s", first_line(error))

    def _finish_pending(self, seconds: float | None, ended_by: BaseException) -> None:
        """Finish the pending checkpoint, if there is one. It is older than the update that failed."""
        if self._run.loop_state is None:
            return
        try:
            self._run.checkpoint_writer.finish(seconds)
        except Exception as error:
            log.warning("%s", first_line(error))

    def _save_state(self, seconds: float | None, ended_by: BaseException) -> None:
        """Save metrics, state and model of the last update that began, once it has ended.

        Args:
            seconds: Time limit for everything together. None: each call has its own limit.
            ended_by: Error that ends the run.
        """
        run, state = self._run, self._run.loop_state
        if state is None:
            return
        until, step = None if seconds is None else time.monotonic() + seconds, state.step
        if (training := run.training) is None:  # only some of the step's roles began to train
            self._finish_pending(seconds_left(until), ended_by)
            self._save_model_only(until, ended_by)
            return
        metrics = training.metrics
        try:
            with run.progress.task(f"waiting for the update of step {step}"):
                figures = training.await_metrics(until)
        except Exception as error:
            self._report_unsaved("state", step, error, ended_by)
            self._finish_pending(seconds_left(until), ended_by)
            if not isinstance(error, StillRunning):
                self._save_model_only(until, ended_by)
            return

        def log_metrics() -> None:
            row = {**(metrics or {}), **figures}
            run.log(step, {name: value for name, value in row.items() if name != "tokens"})

        parts: dict[str, Callable[[], object]] = {}
        if run.run_directory.last_step != step and metrics is not None:  # a row must be complete
            parts["metrics"] = log_metrics
        parts["checkpoint"] = lambda: run.checkpoint_writer.write_last(state, seconds_left(until))
        if run.run_directory.models.saved_step != step:
            parts["model"] = lambda: run.exports.save(step, timeout=seconds_left(until))
        for what, save in parts.items():
            if what == "model" and run.roles.actor.broken and run.run_directory.checkpoints.newest_step != step:
                break  # the reason was reported
            try:
                with run.progress.task(f"saving the {what} of step {step}"):
                    save()
            except Exception as error:  # the run ends for another reason, and more may be saved
                self._report_unsaved(what, step, error, ended_by)

    def _save_model_only(self, until: float | None, ended_by: BaseException) -> None:
        """Save the model of the actor's last update, which is usable even if the state of another role is lost."""
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
        """Warn that something was not saved, unless the error that ended the run already explains it."""
        on_disk = (SaveError, OSError)
        is_same_error = str(error) == str(ended_by) or (isinstance(error, on_disk) and isinstance(ended_by, on_disk))
        is_known = isinstance(ended_by, Exception) and (is_same_error or self._run.roles.actor.broken is not None)
        level = logging.INFO if is_known else logging.WARNING
        cure = ""
        if isinstance(ended_by, KeyboardInterrupt) and isinstance(error, SaveTooLate | StillRunning):
            cure = f"run.grace_seconds is {self._run.config.run.grace_seconds:g}, which is too short; raise it: "
        log.log(level, "%sno %s of step %d was saved: %s", cure, what, step, first_line(error))
