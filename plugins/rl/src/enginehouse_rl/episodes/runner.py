"""Episode runners let an environment play tasks, and apply `rollout.on_failure` to episodes that fail.

An environment is the user's code, and it may call services of the user. It may raise an error, never end, or send a
request that kills replicas. `rollout.on_failure` then decides what happens:

| policy       | consequence                                                                                           |
|--------------|-------------------------------------------------------------------------------------------------------|
| `fail`       | the run ends                                                                                          |
| `retry`      | the episode is generated again with other seeds, up to `MOST_RETRIES` times; after that, the run ends |
| `drop`       | the episode is left out of its group                                                                  |
| `drop_group` | the group is dropped, and another task replaces it                                                    |
| `mask`       | the prompt replaces the episode: it is not trained on, and its reward of 0 counts in its group        |

If the environment plays each episode separately (`EpisodeContext.each`), a failure affects only its episode; otherwise
it affects the whole group. A group without remaining episodes has nothing to train on, so `drop` and `mask` drop it
too. A failure that other tasks would have as well ends the run under any policy (`find_fatal_cause`).
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from enginehouse.engines.environment import Episode, Group, Score, Scored, Segment
from enginehouse.errors import ConfigError
from enginehouse.plugin.records import resolve
from enginehouse.plugin.secrets import insert_variables
from enginehouse_rl.environments.single_turn import SingleTurn
from enginehouse_rl.episodes.checks import EpisodeChecks, MalformedEpisode
from enginehouse_rl.episodes.drawn_tokens import DrawnTokens
from enginehouse_rl.episodes.failures import (
    EpisodeTooLate,
    Failures,
    GivenUp,
    count_failures,
    describe_error,
    describe_task,
    find_fatal_cause,
)
from enginehouse_rl.episodes.play_context import EpisodeDeadline, PlayContext
from enginehouse_rl.episodes.scored_group import ScoredGroup, sum_rewards
from enginehouse_rl.episodes.traces import EpisodeActivity, Trace

if TYPE_CHECKING:
    from enginehouse.engines.environment import Environment, Policy, Task
    from enginehouse.engines.rollout import SamplingParams
    from enginehouse_rl.config.schema import OnFailure
    from enginehouse_rl.episodes.policies import FleetPolicy
    from enginehouse_rl.plan.plan import PlayPlan
    from enginehouse_rl.rewards.weighted import WeightedRewards

T = TypeVar("T")
Row = TypeVar("Row", Episode, Segment)
Scorer = Callable[[Sequence[Mapping[str, Any]]], Awaitable[Sequence[Score]]]
"""Function that scores rows, like the result of `WeightedRewards.scorer`."""


class TaskRunner(Protocol):
    """The runner that the feed uses: an `EpisodeRunner`, or a `WorkerPoolRunner`, which lets another process play."""

    samples: int

    @property
    def last_error(self) -> BaseException | None: ...

    async def play_group(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class TaskKind:
    """The settings with which tasks for one purpose are played, such as training or a benchmark.

    Attributes:
        sampling: Sampling parameters, unless the environment sets its own; `n` is the number of episodes of each task.
        tasks: Number of tasks over which failures of the reward are counted together.
        filtered: True if steps train on the tasks, so that the run's filter decides which groups are kept.
        is_benchmark: True if the tasks are items of a benchmark. Each item then gets one response, which lm-eval
            scores.
    """

    sampling: SamplingParams
    tasks: int
    filtered: bool = False
    is_benchmark: bool = False


@dataclass(frozen=True, slots=True)
class _TaskEpisodes:
    """Episodes, with their traces if the environment plays each episode separately."""

    episodes: Sequence[Episode]
    traces: tuple[Trace | None, ...] = ()


class EpisodeRunner:
    """Plays tasks on one event loop.

    Args:
        samples: Number of episodes of a task.
        on_failure: Policy for an episode that fails (`Failures`).
        seconds: Time limit for an episode, or for a whole group if the environment does not play each episode
            separately. It includes the time spent waiting for replicas and rewards. None: no limit.
        keep: Returns True for a group that is trained on. None: all groups are trained on.
        baseline: Plays one more episode of a task, whose reward is the baseline for the task's other rewards. None: no
            baseline.
        checks: Checks of the environment's episodes. None: the environment is known to return valid episodes.
        activity: Counts what the episodes wait for, and makes the runner keep traces. None: nothing is counted.
        leaves_out: True if an episode without a score is left out of its group (`reward.on_error`).
    """

    def __init__(
        self,
        environment: Environment,
        make_policy: Callable[[Task], Policy],
        scorer: Scorer,
        samples: int,
        on_failure: OnFailure = "fail",
        seconds: float | None = None,
        keep: Callable[[Group], bool] | None = None,
        baseline: EpisodeRunner | None = None,
        checks: EpisodeChecks | None = None,
        activity: EpisodeActivity | None = None,
        leaves_out: bool = False,
    ):
        self._checks, self._leaves_out = checks, leaves_out
        self._keep, self._baseline = keep, baseline
        self.scorer, self.samples, self.failures = scorer, samples, Failures(on_failure)
        self.activity = activity
        self._environment, self._make_policy, self._seconds = environment, make_policy, seconds
        self._longest = 0.0  # seconds of the longest ended attempt with a limit

    async def play_group(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup:
        """Play a task and decide whether the run trains on its episodes. Takes the arguments of `play`."""
        if self._baseline is None:
            played = await self._make_episodes(task, scoring)
            group = Group(task, played.episodes)
        else:
            baseline = asyncio.create_task(self._baseline.play(task))
            baseline.add_done_callback(lambda task: task.cancelled() or task.exception())  # the group may fail first
            try:
                played = await self._make_episodes(task, scoring)
                baseline_episodes = await baseline
            finally:
                baseline.cancel()
            group = Group(
                task,
                played.episodes if baseline_episodes else (),
                sum_rewards(baseline_episodes[0]) if baseline_episodes else None,
            )
        kept = len(group.episodes) > 0 and (self._keep is None or self._keep(group))
        rewards = tuple(episode.score.reward for episode in group.episodes)
        return ScoredGroup(task, rewards, kept, group, traces=played.traces)

    async def play(self, task: Task, scoring: Callable[[], None] = lambda: None) -> Sequence[Episode]:
        """Return the episodes of a task. There are fewer than the task requires, or none, if the failure policy leaves
        episodes out.

        Args:
            scoring: Called when the task's episodes are generated and the last of them is about to be scored.

        Raises:
            EpisodeFailed: An episode failed and the policy ends the run, or it raised an error that is no `Exception`,
                such as `SystemExit`.
            MalformedEpisode: An episode does not pass the checks.
            EnginehouseError: An error that ends the run under any policy.
        """
        return (await self._make_episodes(task, scoring)).episodes

    async def _make_episodes(self, task: Task, scoring: Callable[[], None]) -> _TaskEpisodes:
        policy = self._make_policy(task)
        what = describe_task(task)

        async def make(number: int, deadline: EpisodeDeadline) -> _TaskEpisodes:
            branch: Policy = policy.branch(f"try-{number}") if number else policy
            if self._checks is None:
                return _TaskEpisodes(
                    await self._run(
                        task, branch, PlayContext(self.samples, None, self, task, branch, scoring, deadline)
                    )
                )
            drawn, task_copy = DrawnTokens(), _copy_task(task)
            branch = drawn.record(branch)
            most_tokens = self._checks.most_tokens
            context = PlayContext(self.samples, most_tokens, self, task_copy, branch, scoring, deadline, self.activity)
            with context.track_episodes():
                episodes = await self._run(task_copy, context.trace_policy(branch), context)
            if task_copy != task:
                raise MalformedEpisode(
                    f"environment {self._checks.environment!r}, {what}: it changed the task (prompt_ids, messages or "
                    "columns), which all episodes of the task share. Change a copy, such as list(task.prompt_ids)"
                )
            self._checks.check(episodes, self.samples - context.left_out, drawn, what)
            frozen = [_freeze(episode, self._checks.token_rewards) for episode in episodes]
            return _TaskEpisodes(frozen, tuple(map(context.find_trace, episodes)))

        try:
            result = await self.attempt(what, self.samples, make)
        except GivenUp:
            return _TaskEpisodes([])
        if not self._leaves_out or not any(episode.score.failure for episode in result.episodes):
            return result
        scored_places = [place for place, episode in enumerate(result.episodes) if not episode.score.failure]
        reason = next(episode.score.failure for episode in result.episodes if episode.score.failure)
        self.failures.leave_out(len(result.episodes) - len(scored_places), reason)
        traces = tuple(result.traces[place] for place in scored_places) if result.traces else ()
        return _TaskEpisodes([result.episodes[place] for place in scored_places], traces)

    async def _run(self, task: Task, policy: Policy, context: PlayContext) -> Sequence[Episode]:
        try:
            episodes = await self._environment.run(task, policy, context)
        except Exception:
            if context.verdict is None:
                raise
        if context.verdict is not None:  # even if the environment caught the error
            raise context.verdict
        return episodes

    async def attempt(self, what: str, episodes: int, make: Callable[[int, EpisodeDeadline], Awaitable[T]]) -> T:
        """Return the result of `make`, which is called again after failures as the failure policy requires.

        Args:
            what: Name of the result, for messages.
            episodes: Number of episodes that fail if `make` fails.
            make: Called with the number of the try, from 0, and with the deadline of this try.

        Raises:
            GivenUp: `make` failed, and the run continues without the result.
            EnginehouseError: An error ends the run, as described in `play`.
        """
        number = 0
        while True:
            deadline = EpisodeDeadline(self._seconds)
            outcome = await _settle(make, number, deadline)
            if isinstance(outcome, tuple):
                self._longest = max(self._longest, deadline.spent)
                return outcome[0]
            if isinstance(outcome, EpisodeTooLate):
                outcome = EpisodeTooLate(f"{outcome}{self._describe_waits()}")
            if (fatal := find_fatal_cause(outcome)) is not None:
                raise fatal
            self.failures.add(what, episodes, number, outcome)
            number += 1

    def _describe_waits(self) -> str:
        """Describe what an episode that took too long may have waited for."""
        other_episodes = max(self.activity.episodes - 1, 0) if self.activity is not None else 0
        waits = (
            "; this includes the waits for the engine and the reward, with "
            f"{other_episodes:,} other episodes in progress"
        )
        return waits + (
            f"; the longest attempt that succeeded so far took {self._longest:.3g} s" if self._longest else ""
        )

    @property
    def last_error(self) -> BaseException | None:
        """The latest failure."""
        return self.failures.last_error

    def metrics(self) -> dict[str, float]:
        """Return the number of episodes that failed since the last call, by reason. An episode is counted in each try
        that fails."""
        self.failures.warn_again()
        return count_failures(self.take_counts())

    def take_counts(self) -> Counter[str]:
        """Return the number of episodes that failed since the last call of this method or of `metrics`, by reason."""
        counts = self.failures.take_counts()
        return counts if self._baseline is None else counts + self._baseline.take_counts()


async def _settle(
    make: Callable[[int, EpisodeDeadline], Awaitable[T]], number: int, deadline: EpisodeDeadline
) -> tuple[T] | BaseException:
    """Return the result of `make` in a tuple, or the error that prevented it.

    `make` runs in a separate asyncio task. If this task resists cancellation, nobody waits for it. An error that is no
    `Exception` is caught inside the task, because otherwise it would end the event loop.
    """

    async def make_or_catch() -> tuple[T] | BaseException:
        try:
            return (await make(number, deadline),)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return error

    making = asyncio.create_task(make_or_catch())
    try:
        await asyncio.wait((making, deadline.expiry), return_when=asyncio.FIRST_COMPLETED)
    finally:
        deadline.pause()
        making.cancel()
    if not making.done():
        return EpisodeTooLate(f"it took more than {deadline.seconds:g} s (rollout.episode_seconds)")
    return asyncio.CancelledError("something that it awaited was cancelled") if making.cancelled() else making.result()


def make_environment(plan: PlayPlan) -> Environment:
    """Create the environment of a plan in this process.

    Raises:
        ConfigError: The environment raised an error.
    """
    make = resolve(plan.environment.reference)
    try:
        return make(**insert_variables(plan.environment.arguments))
    except Exception as error:
        raise ConfigError(
            f"environment.name: making {plan.config.environment.name!r} raised {describe_error(error)}"
        ) from error


def make_runner(
    plan: PlayPlan,
    environment: Environment,
    make_policy: Callable[[Task], FleetPolicy],
    rewards: WeightedRewards,
    kind: TaskKind,
    activity: EpisodeActivity,
) -> EpisodeRunner:
    """Make the runner that plays tasks of a kind according to a plan.

    `activity` counts what the episodes wait for. Episodes of `single_turn` are not counted.
    """
    rollout, samples = plan.config.rollout, kind.sampling.n
    if kind.is_benchmark:
        scorer = rewards.make_benchmark_scorer(kind.tasks * samples)
        return EpisodeRunner(SingleTurn(), make_policy, scorer, samples, rollout.on_failure, rollout.episode_seconds)
    scorer = rewards.scorer(kind.tasks * samples)
    keep = partial(resolve(plan.keep.reference), **plan.keep.arguments) if kind.filtered and plan.keep else None
    on_failure = rollout.on_failure, rollout.episode_seconds
    checks, counted = None, None
    if not plan.is_single_turn:  # a test shows that its episodes pass the checks
        counted = activity
        needs = plan.advantage_needs
        by_token = needs is None or "token_rewards" in needs
        trained_at = kind.sampling.temperature if kind.filtered else None
        checks = EpisodeChecks(plan.config.environment.name, plan.vocabulary, plan.most_tokens, by_token, trained_at)
    leaves_out = plan.config.reward.on_error == "leave_out"
    baseline = None
    if kind.filtered and "baseline" in (plan.advantage_needs or ()):
        baseline = EpisodeRunner(
            environment,
            lambda task: make_policy(task).branch_greedily(),
            scorer,
            1,
            *on_failure,
            checks=checks,
            activity=counted,
            leaves_out=leaves_out,
        )
    return EpisodeRunner(
        environment, make_policy, scorer, samples, *on_failure, keep, baseline, checks, counted, leaves_out
    )


def _copy_task(task: Task) -> Task:
    """Copy a task, so that no environment can change the rows of the data, which all steps share."""
    columns, messages = copy.deepcopy((task.columns, task.messages))
    return replace(task, prompt_ids=copy.copy(task.prompt_ids), messages=messages, columns=columns)


def _freeze(episode: Episode, by_token: bool) -> Episode:
    """Copy an episode, so that its environment cannot change it after the checks. With `by_token`, rows without token
    rewards get zeros, because all rows of a step must have the same columns."""

    def copy_row(row: Row) -> Row:
        rewards = row.token_rewards
        if rewards is None and by_token:
            rewards = np.zeros(len(row.tokens), np.float32)
        return replace(
            row,
            tokens=_copy_column(row.tokens),
            mask=_copy_column(row.mask),
            logprobs=_copy_column(row.logprobs),
            versions=_copy_column(row.versions),
            token_rewards=None if rewards is None else _copy_column(rewards),
        )

    score = episode.score
    frozen_score = Scored(score.reward, dict(score.figures), score.failure, score.answer)
    return copy_row(replace(episode, score=frozen_score, earlier=tuple(map(copy_row, episode.earlier))))


def _copy_column(column: Any) -> Any:
    """Copy a list or an array; turn any other sequence, such as a tensor, into an array."""
    return copy.copy(column) if isinstance(column, list | np.ndarray) else np.array(np.asarray(column))
