"""The reasons why episodes and groups fail, and the policy `rollout.on_failure`, which decides what follows."""

from __future__ import annotations

import asyncio
import logging
import textwrap
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from enginehouse.controller.errors import ControllerError, RemoteError, walk_causes
from enginehouse.errors import EnginehouseError, UserError
from enginehouse.fleet.router import PoisonousRows
from enginehouse_rewards.batch import RewardError
from enginehouse_rl.episodes.checks import MalformedEpisode
from enginehouse_rl.episodes.watchdog import PACKAGE_FOLDERS

if TYPE_CHECKING:
    from enginehouse.engines.environment import Task
    from enginehouse_rl.config.schema import OnFailure

log = logging.getLogger(__name__)

MOST_RETRIES = 2
REASONS = ("error", "time", "replica", "worker", "unscored")
"""Reasons why an episode fails: the environment raised an error; it took too long; its request killed replicas; its
worker was lost; or it got no score, and `reward.on_error` leaves it out."""


class EpisodeFailed(EnginehouseError):
    """An episode failed and ends the run. The failure is the `__cause__`."""


class EpisodeTooLate(EnginehouseError):
    """An episode took longer than its time limit."""


class WorkerLost(EnginehouseError):
    """The process that played an episode was lost."""


class GivenUp(Exception):
    """An episode or a group failed, and the run continues without it. The failure is the `__cause__`."""


class Failures:
    """Counts failures, and applies the policy `rollout.on_failure` to each.

    `last_error` is the latest failure.
    """

    def __init__(self, policy: OnFailure):
        self.policy = policy
        self.last_error: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()  # reasons warned of since `warn_again`
        self._traced: set[str] = set()  # reasons for which a traceback was shown

    def add(self, what: str, episodes: int, number: int, error: BaseException) -> None:
        """Count and report a failure. If this method returns, the caller must try again.

        Args:
            what: Name of what failed, for messages.
            episodes: Number of episodes that this failure affects.
            number: Number of earlier failures of the same episode or group.

        Raises:
            GivenUp: The run continues without what failed.
            EpisodeFailed: The run ends.
        """
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise EpisodeFailed(f"{what} failed: {describe_error(error)}") from error
        self.last_error = error
        self._counts[_find_reason(error)] += episodes
        retries = MOST_RETRIES if self.policy == "retry" else 0
        if self.policy == "fail" or 0 < retries == number:
            tries = f" {number + 1} times, the last time" if number else ""
            raise EpisodeFailed(
                f"{what} failed{tries}: {describe_error(error)}\n"
                f"rollout.on_failure decides what happens after a failure; it is {self.policy!r}"
            ) from error
        self._warn(what, error)
        if not retries:
            raise GivenUp from error

    def leave_out(self, episodes: int, why: str) -> None:
        """Count episodes without a score. This logs nothing, because the reward has already warned of the first one."""
        self.last_error = RewardError(f"a response has no score and is left out (reward.on_error=leave_out): {why}")
        self._counts["unscored"] += episodes

    def take_counts(self) -> Counter[str]:
        """Return the number of episodes that failed since the last call, by reason."""
        counts, self._counts = self._counts, Counter()
        return counts

    def warn_again(self) -> None:
        """Allow one more warning for each reason. Without this call, only the first failure for a reason is logged."""
        self._warned.clear()

    def _warn(self, what: str, error: BaseException) -> None:
        reason = _find_reason(error)
        if reason in self._warned:
            return
        self._warned.add(reason)
        has_trace, self._traced = reason in self._traced, self._traced | {reason}
        log.warning(
            "%s failed (rollout.on_failure=%s): %s. Further failures of this step are only counted",
            what,
            self.policy,
            describe_error(error).splitlines()[0],
            exc_info=None if has_trace or isinstance(error, EnginehouseError) else error,
        )


def count_failures(counts: Mapping[str, int]) -> dict[str, float]:
    """Return metrics that count failed episodes by reason."""
    return {f"failed_{reason}": float(counts.get(reason, 0)) for reason in REASONS}


FATAL_ERRORS = (EpisodeFailed, GivenUp, MalformedEpisode, RewardError, UserError, ControllerError)


def find_fatal_cause(error: BaseException) -> Exception | None:
    """Return the first cause of an error that ends the run under any failure policy, or None if there is none.

    Such causes are a reward that gives no score, mistakes of the user or the environment, and errors of the controller
    other than a failed request for tokens.
    """
    for cause in walk_causes(error):
        is_request = isinstance(cause, PoisonousRows | RemoteError)
        if isinstance(cause, FATAL_ERRORS) and not is_request:
            return cause
    return None


def _find_reason(error: BaseException) -> str:
    if isinstance(error, EpisodeTooLate):
        return "time"
    if isinstance(error, WorkerLost):
        return "worker"
    return "replica" if any(isinstance(cause, PoisonousRows) for cause in walk_causes(error)) else "error"


def describe_error(error: BaseException) -> str:
    """Describe an error and the line of the user's code that raised it. For a group of errors, describe the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EnginehouseError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(PACKAGE_FOLDERS)] or frames
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in user_frames[-1:])
    return (f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) + where


def describe_task(task: Task) -> str:
    return f"task {task.serial} (prompt {textwrap.shorten(task.prompt, 60, placeholder=' ...')!r})"
