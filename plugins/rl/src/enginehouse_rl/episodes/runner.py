"""Plays tasks by an environment: what that asks for tokens, and groups of episodes, whatever becomes of single ones.

An environment is somebody's own code, and so is what it speaks to: it may raise, never end, or ask for what takes
replicas down. What is done then is `rollout.on_failure`:

| policy | |
|---|---|
| `fail` | the run ends |
| `retry` | it is made again, up to `MOST_RETRIES` times, with other seeds; then as `fail` |
| `drop` | the episode is left out of its group |
| `drop_group` | the group is dropped, and another task drawn |
| `mask` | in its place is the prompt alone: nothing of it is trained on, and its reward of 0 counts in its group |

An episode fails by itself where the environment plays each by itself (`EpisodeContext.each`); else its whole group
does. A group of which no episode is left is dropped by `drop` and `mask` too: it has nothing to train on.

What ends the run under any policy would not be mended by other tasks (`find_fatal_cause`).
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
    describe_error,
    describe_task,
    failure_metrics,
    find_fatal_cause,
)
from enginehouse_rl.episodes.play_context import EpisodeDeadline, PlayContext
from enginehouse_rl.episodes.scored_group import ScoredGroup, total_reward
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
"""Scores rows, as `WeightedRewards.scorer` does."""


class TaskRunner(Protocol):
    """What the feed asks: a `EpisodeRunner`, or what has one play elsewhere."""

    samples: int

    @property
    def last_error(self) -> BaseException | None:
        """What failed last."""
        ...

    async def play_group(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup:
        """See `EpisodeRunner.play_group`."""
        ...

    def metrics(self) -> dict[str, float]:
        """See `EpisodeRunner.metrics`."""
        ...


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What tasks are played for.

    Attributes:
        sampling: how their tokens are drawn, unless the environment says otherwise; `n` episodes of each task.
        tasks: so many are judged together by the rewards they lack.
        filtered: whether the run's filter says which are trained on; else all are.
        is_benchmark: whether they are items of a benchmark: each is answered once, and lm-eval scores the response.
    """

    sampling: SamplingParams
    tasks: int
    filtered: bool = False
    is_benchmark: bool = False


@dataclass(frozen=True, slots=True)
class _TaskEpisodes:
    """Episodes, and the traces of those whose environment plays each by itself."""

    episodes: Sequence[Episode]
    traces: tuple[Trace | None, ...] = ()


class EpisodeRunner:
    """Plays tasks. All on one event loop.

    Args:
        environment: makes their episodes.
        make_policy: what a task's episodes are drawn from.
        scorer: scores them.
        samples: how many episodes are asked for.
        on_failure: what is done about one that fails (`Failures`).
        seconds: longest time for making one, or all of a group where the environment does not play each by itself;
            waiting for replicas and rewards is part of it. None: any.
        keep: which groups are trained on. None: all.
        baseline: plays the one episode of a task whose reward the others' are compared with. None: nothing does.
        checks: what the environment's episodes have to be. None: it is known to make such.
        activity: told what episodes are at, of which traces are kept then. None: nothing is.
        leaves_out: whether an episode that nobody could score is left out of its group (`reward.on_error`).
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
        self._longest = 0.0  # seconds of the longest that ended, of those that have a limit

    async def play_group(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup:
        """As `play`, and whether its episodes are trained on."""
        if self._baseline is None:
            made = await self._make_episodes(task, scoring)
            group = Group(task, made.episodes)
        else:
            alone = asyncio.create_task(self._baseline.play(task))
            alone.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # this fails first, maybe
            try:
                made = await self._make_episodes(task, scoring)
                compared = await alone
            finally:
                alone.cancel()
            group = Group(task, made.episodes if compared else (), total_reward(compared[0]) if compared else None)
        kept = len(group.episodes) > 0 and (self._keep is None or self._keep(group))
        rewards = tuple(episode.score.reward for episode in group.episodes)
        return ScoredGroup(task, rewards, kept, group, traces=made.traces)

    async def play(self, task: Task, scoring: Callable[[], None] = lambda: None) -> Sequence[Episode]:
        """The episodes of a task. Fewer than were asked for, or none, where the policy leaves some out.

        Args:
            task: what to play.
            scoring: called when its episodes are drawn, and the last of them is about to be scored.

        Raises:
            EpisodeFailed: one failed, and the policy is to end the run; or it raised what is no `Exception`.
            MalformedEpisode: one is not what it has to be.
            EnginehouseError: what ends the run under any policy.
        """
        return (await self._make_episodes(task, scoring)).episodes

    async def _make_episodes(self, task: Task, scoring: Callable[[], None]) -> _TaskEpisodes:
        policy = self._make_policy(task)
        what = describe_task(task)

        async def make(number: int, deadline: EpisodeDeadline) -> _TaskEpisodes:
            own: Policy = policy.branch(f"try-{number}") if number else policy
            if self._checks is None:
                return _TaskEpisodes(
                    await self._run(task, own, PlayContext(self.samples, None, self, task, own, scoring, deadline))
                )
            drawn, mine = DrawnTokens(), _copy_task(task)
            own = drawn.record(own)
            most_tokens = self._checks.most_tokens
            context = PlayContext(self.samples, most_tokens, self, mine, own, scoring, deadline, self.activity)
            with context.track_episodes():
                episodes = await self._run(mine, context.trace_policy(own), context)
            if mine != task:
                raise MalformedEpisode(
                    f"environment {self._checks.environment!r}, {what}: it changed the task, which all its episodes "
                    "share: prompt_ids, messages or columns. Change a copy, list(task.prompt_ids)"
                )
            self._checks.check(episodes, self.samples - context.left_out, drawn, what)
            kept = [_freeze(one) for one in episodes]
            if self._checks.token_rewards:
                kept = [_add_token_rewards(one) for one in kept]
            return _TaskEpisodes(kept, tuple(map(context.find_trace, episodes)))

        try:
            made = await self.attempt(what, self.samples, make)
        except GivenUp:
            return _TaskEpisodes([])
        if not self._leaves_out or not any(episode.score.failure for episode in made.episodes):
            return made
        scored = [place for place, episode in enumerate(made.episodes) if not episode.score.failure]
        why = next(episode.score.failure for episode in made.episodes if episode.score.failure)
        self.failures.leave_out(len(made.episodes) - len(scored), why)
        traces = tuple(made.traces[place] for place in scored) if made.traces else ()
        return _TaskEpisodes([made.episodes[place] for place in scored], traces)

    async def _run(self, task: Task, policy: Policy, context: PlayContext) -> Sequence[Episode]:
        try:
            episodes = await self._environment.run(task, policy, context)
        except Exception:
            if context.verdict is None:
                raise
        if context.verdict is not None:  # whatever the environment made of it
            raise context.verdict
        return episodes

    async def attempt(self, what: str, episodes: int, make: Callable[[int, EpisodeDeadline], Awaitable[T]]) -> T:
        """Make something, as the policy says again.

        Args:
            what: it is, for messages.
            episodes: how many fail with it.
            make: makes it, by the number of the try and with a deadline.

        Raises:
            GivenUp: it failed, and the run goes on without it.
            EnginehouseError: as `play`.
        """
        number = 0
        while True:
            deadline = EpisodeDeadline(self._seconds)
            made = await _settle(make, number, deadline)
            if isinstance(made, tuple):
                self._longest = max(self._longest, deadline.spent)
                return made[0]
            if isinstance(made, EpisodeTooLate):
                made = EpisodeTooLate(f"{made}{self._describe_waits()}")
            if (beyond := find_fatal_cause(made)) is not None:
                raise beyond
            self.failures.add(what, episodes, number, made)
            number += 1

    def _describe_waits(self) -> str:
        """What an episode that took too long may have waited for, in words."""
        beside = max(self.activity.episodes - 1, 0) if self.activity is not None else 0
        waits = f"; that counts what it waits for the engine and the reward, beside {beside} others under way"
        return waits + (f"; the longest that ended so far took {self._longest:.3g} s" if self._longest else "")

    @property
    def last_error(self) -> BaseException | None:
        """What failed last."""
        return self.failures.last_error

    def metrics(self) -> dict[str, float]:
        """How many episodes failed since this was asked for last, each try counted, by reason."""
        self.failures.warn_again()
        return failure_metrics(self.take_counts())

    def take_counts(self) -> Counter[str]:
        """How many episodes failed since this or `metrics` was asked for last, by reason."""
        counts = self.failures.take_counts()
        return counts if self._baseline is None else counts + self._baseline.take_counts()


async def _settle(
    make: Callable[[int, EpisodeDeadline], Awaitable[T]], number: int, deadline: EpisodeDeadline
) -> tuple[T] | BaseException:
    """What came of making something, in a tuple, or why nothing did.

    It is made in a task of its own. One that resists cancelling is not waited for, and what is no `Exception` does not
    leave it, as it would end the event loop.
    """

    async def outcome() -> tuple[T] | BaseException:
        try:
            return (await make(number, deadline),)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            return error

    making = asyncio.create_task(outcome())
    try:
        await asyncio.wait((making, deadline.expiry), return_when=asyncio.FIRST_COMPLETED)
    finally:
        deadline.pause()
        making.cancel()
    if not making.done():
        return EpisodeTooLate(f"it took more than {deadline.seconds:g} s (rollout.episode_seconds)")
    return asyncio.CancelledError("something that it awaited was cancelled") if making.cancelled() else making.result()


def make_environment(plan: PlayPlan) -> Environment:
    """Make the environment of a plan, in this process.

    Raises:
        ConfigError: it raises.
    """
    made = resolve(plan.environment.reference)
    try:
        return made(**insert_variables(plan.environment.arguments))
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
    """What plays tasks as a plan says.

    Args:
        plan: of the run.
        environment: the plan's.
        make_policy: what a task's episodes are drawn from.
        rewards: score them.
        kind: what they are played for.
        activity: told what episodes are at, but for those of `single_turn`.
    """
    rollout, samples = plan.config.rollout, kind.sampling.n
    if kind.is_benchmark:
        scorer = rewards.make_benchmark_scorer(kind.tasks * samples)
        return EpisodeRunner(SingleTurn(), make_policy, scorer, samples, rollout.on_failure, rollout.episode_seconds)
    scorer = rewards.scorer(kind.tasks * samples)
    keep = partial(resolve(plan.keep.reference), **plan.keep.arguments) if kind.filtered and plan.keep else None
    failing = rollout.on_failure, rollout.episode_seconds
    checks, told = None, None
    if not plan.is_single_turn:  # whose episodes are what they have to be, as its test shows
        told = activity
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
            *failing,
            checks=checks,
            activity=told,
            leaves_out=leaves_out,
        )
    return EpisodeRunner(environment, make_policy, scorer, samples, *failing, keep, baseline, checks, told, leaves_out)


def _copy_task(task: Task) -> Task:
    """A task that an environment may change, and nobody else sees it: rows of the data are there for all steps."""
    columns, messages = copy.deepcopy((task.columns, task.messages))
    return replace(task, prompt_ids=copy.copy(task.prompt_ids), messages=messages, columns=columns)


def _freeze(episode: Episode) -> Episode:
    """The same episode, which its environment cannot change any more: it was checked as it is."""

    def of(row: Row) -> Row:
        return replace(
            row,
            tokens=_copy_column(row.tokens),
            mask=_copy_column(row.mask),
            logprobs=_copy_column(row.logprobs),
            versions=_copy_column(row.versions),
            token_rewards=None if row.token_rewards is None else _copy_column(row.token_rewards),
        )

    given = episode.score
    score = Scored(given.reward, dict(given.figures), given.failure, given.answer)
    return of(replace(episode, score=score, earlier=tuple(map(of, episode.earlier))))


def _copy_column(column: Any) -> Any:
    """A copy: of a list or an array as such, of all else that is read as one, as a tensor's, as an array."""
    return copy.copy(column) if isinstance(column, list | np.ndarray) else np.array(np.asarray(column))


def _add_token_rewards(episode: Episode) -> Episode:
    """All rows of a step have the same columns."""

    def of(row: Row) -> Row:
        return replace(row, token_rewards=np.zeros(len(row.tokens), np.float32)) if row.token_rewards is None else row

    return of(replace(episode, earlier=[*map(of, episode.earlier)]) if episode.earlier else episode)
