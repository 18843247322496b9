"""Traces record what episodes wait for while they are played, and how each episode spent its time.

Environments need no code for this. Their requests to the policy and to the configured reward are recorded; the rest of
an episode's time counts as spent in the environment and its tools. Episodes of `single_turn` are not traced, because it
has no tools.
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
"""Maximum number of episodes that the timeline shows for a step. It shows the longest episodes."""


Span = tuple[float, float]
"""Start and end, in seconds of `time.monotonic()`."""
REWARD_WAITS: ContextVar[list[Span] | None] = ContextVar("REWARD_WAITS", default=None)
"""The list that records when the current episode waits for the configured reward."""


@dataclass(slots=True)
class EpisodeActivity:
    """Number of episodes in progress, and what they wait for.

    Attributes:
        episodes: Number of episodes that have begun and not ended.
        drawing: Number of these episodes that wait for tokens.
        scoring: Number of these episodes that wait for the configured reward.
    """

    episodes: int = 0
    drawing: int = 0
    scoring: int = 0

    @classmethod
    def sum(cls, parts: Iterable[EpisodeActivity]) -> EpisodeActivity:
        """Sum the activities of several processes."""
        activities = list(parts)
        return cls(
            *(sum(getattr(activity, name) for activity in activities) for name in ("episodes", "drawing", "scoring"))
        )

    @property
    def in_tools(self) -> int:
        """Number of episodes that wait for their environment, and not for tokens or the configured reward."""
        return max(self.episodes - self.drawing - self.scoring, 0)

    def __str__(self) -> str:
        """Describe the activity; empty if no episode is in progress."""
        if not self.episodes:
            return ""
        scored = f", {self.scoring:,} being scored" if self.scoring else ""
        return f"episodes: {self.episodes:,} in progress, {self.in_tools:,} in tools{scored}"

    @contextmanager
    def track_scoring(self, count: int) -> Iterator[None]:
        """Count `count` episodes as waiting for their reward until the context ends."""
        begun = time.monotonic()
        self.scoring += count
        try:
            yield
        finally:
            self.scoring -= count
            if (spans := REWARD_WAITS.get()) is not None:
                spans.append((begun, time.monotonic()))


class ChatTurn(NamedTuple):
    """A request of an episode: its start and end (`time.monotonic()`), the number of tokens that it generated, and the
    newest weight version that generated any of these tokens."""

    begun: float
    ended: float
    tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The time that an episode spent on its turns, on its reward, and otherwise in its environment.

    Attributes:
        begun: Start in seconds of this machine's `time.monotonic()`, like all times here.
        turns: The episode's requests in the order in which they ended. If the episode was tried several times, only
            requests of the last try are listed.
        reward_waits: Times during which the episode waited for the configured reward.
    """

    begun: float
    ended: float
    turns: tuple[ChatTurn, ...]
    reward_waits: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def drawing_seconds(self) -> float:
        """Seconds during which the episode waited for tokens."""
        return _cover([(turn.begun, turn.ended) for turn in self.turns])

    @property
    def in_tools_seconds(self) -> float:
        """Seconds during which the episode waited for neither tokens nor the configured reward."""
        return self.seconds - _cover([*((turn.begun, turn.ended) for turn in self.turns), *self.reward_waits])

    def shift(self, seconds: float) -> Trace:
        """Return the trace with `seconds` added to all its times, to convert it to the clock of another machine."""
        turns = tuple(turn._replace(begun=turn.begun + seconds, ended=turn.ended + seconds) for turn in self.turns)
        waits = tuple((begun + seconds, ended + seconds) for begun, ended in self.reward_waits)
        return replace(self, begun=self.begun + seconds, ended=self.ended + seconds, turns=turns, reward_waits=waits)

    def rows(self) -> list[dict[str, float]]:
        """Return a row for each turn: its number of tokens, its duration in seconds, the seconds since the end of the
        previous turn, and the weight version."""
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
    """Implements `enginehouse.engines.environment.Policy`, and records the requests to another policy and its branches.

    Args:
        activity: Counts the episodes that wait for tokens.
        turns: List to which requests are added. None: requests are not recorded.
    """

    def __init__(self, policy: Policy, activity: EpisodeActivity, turns: list[ChatTurn] | None = None):
        self.tokenizer, self.sampling = policy.tokenizer, policy.sampling
        self._policy, self._activity, self._turns = policy, activity, turns

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        begun = time.monotonic()
        self._activity.drawing += n
        try:
            completions = await self._policy.samples(tokens, n, sampling)
        finally:
            self._activity.drawing -= n
        if self._turns is not None:
            tokens_drawn, version = (
                sum(len(completion.token_ids) for completion in completions),
                completions[-1].last_version,
            )
            self._turns.append(ChatTurn(begun, time.monotonic(), tokens_drawn, version))
        return completions

    def branch(self, name: str) -> Policy:
        return TracedPolicy(self._policy.branch(name), self._activity, self._turns)


def measure_traces(traces: Iterable[Trace | None]) -> dict[str, float]:
    """Return metrics of episodes: mean number of turns, mean and maximum duration, and fraction of time in the
    environment.

    The fraction leaves out the time spent waiting for the configured reward.
    """
    known_traces = [trace for trace in traces if trace is not None]
    if not known_traces:
        return {}
    drawing = sum(trace.drawing_seconds for trace in known_traces)
    in_tools = sum(trace.in_tools_seconds for trace in known_traces)
    return {
        "episode/turns": sum(len(trace.turns) for trace in known_traces) / len(known_traces),
        "episode/seconds_mean": sum(trace.seconds for trace in known_traces) / len(known_traces),
        "episode/seconds_max": max(trace.seconds for trace in known_traces),
        "episode/in_tools": in_tools / max(drawing + in_tools, 1e-9),
    }


def draw_traces(timeline: Timeline, traces: Sequence[Trace | None]) -> None:
    """Draw the longest of a step's traces on the timeline, each as a sequence of waits.

    Args:
        traces: Trace of each sample. None: not known.
    """
    known_traces = [(row, trace) for row, trace in enumerate(traces) if trace is not None]
    longest = sorted(known_traces, key=lambda entry: entry[1].seconds, reverse=True)[:MOST_TRACED]
    for row, trace in sorted(longest, key=lambda entry: entry[1].begun):
        parts: list[tuple[str, float, float, dict[str, Any]]] = []
        begun = trace.begun
        waits: list[tuple[str, float, float, dict[str, Any]]] = [
            *(
                ("draw", turn.begun, turn.ended, {"turn": number, "tokens": turn.tokens, "version": turn.version})
                for number, turn in enumerate(sorted(trace.turns))
            ),
            *(("score", *span, {}) for span in trace.reward_waits),
        ]
        for wait in sorted(waits, key=lambda span: span[1:3]):
            if wait[1] > begun:
                parts.append(("in tools", begun, wait[1], {}))
            if wait[1] >= begun:  # concurrent turns are left out, because spans of a track must nest
                parts.append(wait)
            begun = max(begun, wait[2])
        if trace.ended > begun:
            parts.append(("in tools", begun, trace.ended, {}))
        timeline.lane(TRACK, "episode", trace.begun, trace.ended, parts, sample=row)


def _cover(spans: Iterable[Span]) -> float:
    """Return the number of seconds that at least one span covers."""
    covered, reached = 0.0, -math.inf
    for begun, ended in sorted(spans):
        covered += max(ended - max(begun, reached), 0.0)
        reached = max(reached, ended)
    return covered
