"""The play context serves an environment during one try of a task: it scores, plays and times episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse.engines.environment import Episode
from enginehouse_rewards import program
from enginehouse_rl.episodes.checks import FAILED
from enginehouse_rl.episodes.failures import GivenUp, describe_task
from enginehouse_rl.episodes.traces import REWARD_WAITS, ChatTurn, EpisodeActivity, Span, Trace, TracedPolicy

if TYPE_CHECKING:
    from enginehouse.engines.environment import Policy, Score, Task
    from enginehouse_rl.episodes.runner import EpisodeRunner


@dataclass(slots=True, eq=False)
class PlayContext:
    """Implements `enginehouse.engines.environment.EpisodeContext` for one try of one task.

    Attributes:
        verdict: Error that `each` raised and that fails the whole task; None if there is none.
        left_out: Number of episodes that failed in `each` and were left out of its result.
        activity: Counts what the episodes wait for. None: nothing is counted.
        unended: Number of this task's episodes that `activity` counts as in progress.
        traces: Trace of each episode that `each` played, by the `id` of the object that holds the episode's tokens. An
            environment may replace the score of an episode or change the order of episodes, but keeps this object.
        unscored: Number of episodes for which the environment has not requested a score.
    """

    samples: int
    most_tokens: int | None
    runner: EpisodeRunner
    task: Task
    policy: Policy
    scoring: Callable[[], None]
    deadline: EpisodeDeadline
    activity: EpisodeActivity | None = None
    verdict: Exception | None = None
    left_out: int = 0
    unended: int = 0
    traces: dict[int, tuple[object, Trace]] = field(default_factory=dict)
    unscored: int = field(init=False)

    def __post_init__(self) -> None:
        self.unscored = self.samples

    async def score(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        self.unscored -= len(rows)
        if self.unscored <= 0:
            self.scoring()
        with self.activity.track_scoring(len(rows)) if self.activity is not None else nullcontext():
            return await self.runner.scorer(rows)

    @contextmanager
    def track_episodes(self) -> Iterator[None]:
        """Count each episode as in progress until it ends, at the latest until the context ends."""
        self._end(-self.samples)
        try:
            yield
        finally:
            self._end(self.unended)

    def _end(self, episodes: int) -> None:
        if self.activity is not None:
            self.unended -= episodes
            self.activity.episodes -= episodes

    def trace_policy(self, policy: Policy, turns: list[ChatTurn] | None = None) -> Policy:
        """Return a policy that records its requests. If no activity is counted, return `policy` itself."""
        return policy if self.activity is None else TracedPolicy(policy, self.activity, turns)

    def find_trace(self, episode: Episode) -> Trace | None:
        """Return the trace that `each` recorded for an episode, or None if it recorded none."""
        _, trace = self.traces.get(id(episode.tokens), (None, None))
        return trace

    async def each(self, play: Callable[[int, Policy], Awaitable[Episode]]) -> Sequence[Episode]:
        self.deadline.pause()
        playing = [asyncio.create_task(self._play_one(play, index)) for index in range(self.samples)]
        try:
            outcomes = await asyncio.gather(*playing)
            if all(isinstance(outcome, GivenUp) for outcome in outcomes):
                raise GivenUp from self.runner.failures.last_error
        except Exception as error:
            self.verdict = self.verdict or error
            raise
        finally:
            for outcome in playing:
                outcome.cancel()
            self.deadline.resume()
        if self.runner.failures.policy == "mask":
            return [self._make_masked() if isinstance(outcome, GivenUp) else outcome for outcome in outcomes]
        remaining = [outcome for outcome in outcomes if not isinstance(outcome, GivenUp)]
        self.left_out += len(outcomes) - len(remaining)
        return remaining

    async def _play_one(self, play: Callable[[int, Policy], Awaitable[Episode]], index: int) -> Episode | GivenUp:
        async def make(number: int, deadline: EpisodeDeadline) -> Episode:
            branch = self.policy.branch(f"episode-{index}" + (f"-try-{number}" if number else ""))
            begun, turns, reward_waits = time.monotonic(), list[ChatTurn](), list[Span]()
            REWARD_WAITS.set(reward_waits)  # in the asyncio task that plays only this episode
            episode = await play(index, self.trace_policy(branch, turns))
            if turns:
                tokens = getattr(episode, "tokens", None)
                self.traces[id(tokens)] = tokens, Trace(begun, time.monotonic(), tuple(turns), tuple(reward_waits))
            return episode

        try:
            return await self.runner.attempt(f"episode {index} of {describe_task(self.task)}", 1, make)
        except GivenUp as given_up:
            if self.runner.failures.policy == "drop_group":
                raise
            return given_up
        finally:
            self._end(min(self.unended, 1))

    def _make_masked(self) -> Episode:
        """Return the episode that replaces a failed episode under the policy `mask`."""
        tokens = self.task.prompt_ids
        zeros = [0] * len(tokens)
        score = program.RowScore(0.0, {})
        return Episode(tokens, [False] * len(tokens), zeros, zeros, score, self.task.prompt, "", FAILED)


class EpisodeDeadline:
    """A time limit that can be paused. It starts when it is created.

    Attributes:
        seconds: Time limit. None: it never passes.
        spent: Seconds that had passed at the last pause.
        expiry: Future that is done once the time has passed.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self.spent = 0.0
        self._loop = asyncio.get_running_loop()
        self.expiry: asyncio.Future[None] = self._loop.create_future()
        self._left = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.resume()

    def pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._left, self._timer = self._timer.when() - self._loop.time(), None
            self.spent = (self.seconds or 0.0) - self._left

    def resume(self) -> None:
        if self._left is not None and self._timer is None and not self.expiry.done():
            self._timer = self._loop.call_later(self._left, self.expiry.set_result, None)
