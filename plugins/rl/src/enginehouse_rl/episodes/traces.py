"""What episodes are at while they are played, and what each spent its time on.

An environment need not help: what it asks its policy and the configured reward for is seen, and all the rest of an
episode's time is its own, its tools'. Of `single_turn` nothing is: it has no tools.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from enginehouse_rl.episodes.policies import SamplingPolicy

if TYPE_CHECKING:
    from enginehouse.engines.environment import Policy
    from enginehouse.engines.rollout import Completion, SamplingParams
    from enginehouse_rl.runs.timeline import Timeline

TRACK = "episodes"
MOST_TRACED = 24
"""So many episodes of a step are drawn on the timeline: those that took longest."""


Span = tuple[float, float]
"""From when to when, as of `time.monotonic()`."""
REWARD_WAITS: ContextVar[list[Span] | None] = ContextVar("REWARD_WAITS", default=None)
"""Where it is noted when the episode that is played waits for the configured reward."""


@dataclass(slots=True)
class EpisodeActivity:
    """How many episodes are under way, and what they wait for.

    Attributes:
        episodes: that were begun and have not ended.
        drawing: of these, those that wait for tokens.
        scoring: those that wait for the configured reward.
    """

    episodes: int = 0
    drawing: int = 0
    scoring: int = 0

    @classmethod
    def sum(cls, parts: Iterable[EpisodeActivity]) -> EpisodeActivity:
        """Of several processes."""
        every = list(parts)
        return cls(*(sum(getattr(one, name) for one in every) for name in ("episodes", "drawing", "scoring")))

    @property
    def in_tools(self) -> int:
        """Those that wait for neither, but for their environment."""
        return max(self.episodes - self.drawing - self.scoring, 0)

    def __str__(self) -> str:
        """For people; empty where none is under way."""
        if not self.episodes:
            return ""
        scored = f", {self.scoring:,} being scored" if self.scoring else ""
        return f"episodes {self.episodes:,} under way, {self.in_tools:,} in tools{scored}"

    @contextmanager
    def track_scoring(self, count: int) -> Iterator[None]:
        """So many wait for their reward."""
        begun = time.monotonic()
        self.scoring += count
        try:
            yield
        finally:
            self.scoring -= count
            if (noted := REWARD_WAITS.get()) is not None:
                noted.append((begun, time.monotonic()))


class ChatTurn(NamedTuple):
    """A request of an episode's: from when to when, as of `time.monotonic()`, how many tokens it drew, and the newest
    weight version that these are of."""

    begun: float
    ended: float
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What an episode spent its time on: its turns, its reward, and besides its environment.

    Attributes:
        begun: when, by this machine's `time.monotonic()`; so are all times.
        ended: likewise.
        turns: its requests, as they ended; of one that it made again, the last time.
        reward_waits: when it waited for the configured reward.
    """

    begun: float
    ended: float
    turns: tuple[ChatTurn, ...]
    reward_waits: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun

    @property
    def drawing_seconds(self) -> float:
        """How long it waited for tokens."""
        return _cover([(turn.begun, turn.ended) for turn in self.turns])

    @property
    def in_tools_seconds(self) -> float:
        """How long it waited for neither tokens nor the configured reward."""
        return self.seconds - _cover([*((turn.begun, turn.ended) for turn in self.turns), *self.reward_waits])

    def shift(self, seconds: float) -> Trace:
        """By another clock, which is so much ahead."""
        turns = tuple(turn._replace(begun=turn.begun + seconds, ended=turn.ended + seconds) for turn in self.turns)
        waits = tuple((begun + seconds, ended + seconds) for begun, ended in self.reward_waits)
        return replace(self, begun=self.begun + seconds, ended=self.ended + seconds, turns=turns, reward_waits=waits)

    def rows(self) -> list[dict[str, float]]:
        """For `samples/`: of each turn its tokens, the seconds in which they were drawn, those in the environment
        before, and the weight version."""
        befores = (self.begun, *(turn.ended for turn in self.turns))
        return [
            {
                "tokens": turn.tokens,
                "seconds": round(turn.ended - turn.begun, 3),
                "before": round(max(turn.begun - before, 0.0), 3),
                "version": turn.version,
            }
            for turn, before in zip(self.turns, befores, strict=False)
        ]


class TracedPolicy(SamplingPolicy):
    """A policy, seen from beside: what is asked of it and of its branches. Implements
    `enginehouse.engines.environment.Policy`.

    Args:
        policy: draws.
        activity: told how many episodes wait for tokens.
        turns: where requests are noted. None: nowhere.
    """

    def __init__(self, policy: Policy, activity: EpisodeActivity, turns: list[ChatTurn] | None = None):
        self.tokenizer, self.sampling = policy.tokenizer, policy.sampling
        self._policy, self._activity, self._turns = policy, activity, turns

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """See the protocol."""
        begun = time.monotonic()
        self._activity.drawing += n
        try:
            completions = await self._policy.samples(tokens, n, sampling)
        finally:
            self._activity.drawing -= n
        if self._turns is not None:
            drawn, version = sum(len(one.token_ids) for one in completions), completions[-1].last_version
            self._turns.append(ChatTurn(begun, time.monotonic(), drawn, version))
        return completions

    def branch(self, name: str) -> Policy:
        """See the protocol."""
        return TracedPolicy(self._policy.branch(name), self._activity, self._turns)


def trace_metrics(traces: Iterable[Trace | None]) -> dict[str, float]:
    """Figures of episodes: turns and seconds of one, the longest, and the share that they spent in their environment of
    the time in which they did not wait for the configured reward."""
    found = [trace for trace in traces if trace is not None]
    if not found:
        return {}
    drawing = sum(trace.drawing_seconds for trace in found)
    in_tools = sum(trace.in_tools_seconds for trace in found)
    return {
        "episode/turns": sum(len(trace.turns) for trace in found) / len(found),
        "episode/seconds_mean": sum(trace.seconds for trace in found) / len(found),
        "episode/seconds_max": max(trace.seconds for trace in found),
        "episode/in_tools": in_tools / max(drawing + in_tools, 1e-9),
    }


def draw_traces(timeline: Timeline, traces: Sequence[Trace | None]) -> None:
    """Draw the longest episodes of a step: for each what it waited for, one after another.

    Args:
        timeline: where.
        traces: one a sample of the step.
    """
    found = [(row, trace) for row, trace in enumerate(traces) if trace is not None]
    longest = sorted(found, key=lambda one: one[1].seconds, reverse=True)[:MOST_TRACED]
    for row, trace in sorted(longest, key=lambda one: one[1].begun):
        parts: list[tuple[str, float, float, dict[str, Any]]] = []
        begun = trace.begun
        waits: list[tuple[str, float, float, dict[str, Any]]] = [
            *(
                ("draw", turn.begun, turn.ended, {"turn": number, "tokens": turn.tokens, "version": turn.version})
                for number, turn in enumerate(sorted(trace.turns))
            ),
            *(("score", *span, {}) for span in trace.reward_waits),
        ]
        for wait in sorted(waits, key=lambda one: one[1:3]):
            if wait[1] > begun:
                parts.append(("in tools", begun, wait[1], {}))
            if wait[1] >= begun:  # those beside another are left out: spans of a track must nest
                parts.append(wait)
            begun = max(begun, wait[2])
        if trace.ended > begun:
            parts.append(("in tools", begun, trace.ended, {}))
        timeline.lane(TRACK, "episode", trace.begun, trace.ended, parts, sample=row)


def _cover(spans: Iterable[Span]) -> float:
    """Seconds that lie in at least one of some spans."""
    covered, reached = 0.0, -math.inf
    for begun, ended in sorted(spans):
        covered += max(ended - max(begun, reached), 0.0)
        reached = max(reached, ended)
    return covered
