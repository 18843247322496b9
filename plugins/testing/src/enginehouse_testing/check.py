"""What a check is: what is done with an engine or a transport, and how what was seen is judged.

A check's acts use the public protocol alone: those of a training engine run on every rank, in lock step; those of a
rollout engine in the process of its replica; those of all else where the suite runs. Its judge runs once, where the
suite runs, and turns what was seen into one number that may not exceed the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

PROTOCOL = "protocol"
"""In the place of a capability: what every engine does."""

EXACT = 0.0
"""The tolerance of what must be equal bit for bit."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw in one act.

    Attributes:
        dp_rank: the data shard it worked on.
        dp_size: number of data shards.
        is_output: whether it answers for its shard.
        value: what the act returned.
    """

    dp_rank: int
    dp_size: int
    is_output: bool
    value: Any


@dataclass(frozen=True, slots=True)
class Measured:
    """A judge's finding.

    Attributes:
        error: what is compared with the tolerance; `inf` where something is wrong that has no size.
        detail: what and where, in words.
    """

    error: float
    detail: str = ""


Act = Callable[[Any], Any]
"""Takes a `Rank`, a `Replica` (then it is a coroutine function), a `Link`, or the trial of a function."""

Judge = Callable[..., Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One property of an engine, a transport or a function.

    Attributes:
        name: what it is called in reports and asked for by.
        capability: which capability it belongs to, or `PROTOCOL`.
        claim: the property, in one sentence.
        tolerance: largest error that passes; relative where the claim says so.
        acts: of a training engine each runs on fresh engines, and what they share is `Rank.directory`.
        judge: `judge(*seen)`, one list for each act, with one `Seen` for each rank.
        between: the second act runs in another layout than the first, with another number of processes.
        device: `"cuda"`: not run where there is no GPU for each process.
        also: another capability that it takes; empty: none.
        reads: it reads back what was written, and is not run where its author did not say how (`Given.read`).
        since: the contract version it came in; of a plugin written for an older one it warns, and fails nothing.
    """

    name: str
    capability: str
    claim: str
    tolerance: float
    acts: tuple[Act, ...]
    judge: Judge
    between: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    also: str = ""
    reads: bool = False
    since: str = "1.0"

    def declared(self, capabilities: Collection[str]) -> bool:
        """Whether it is to be passed by who declares these."""
        return all(name in (PROTOCOL, "", *capabilities) for name in (self.capability, self.also))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCheck(Check):
    """One property of a rollout engine. Its one act gets a replica that serves `model`, at rest and not paused.

    The replica is the one the check before used, where that served the same model: checks depend on nothing before
    them but on its weight version.

    Attributes:
        model: what the replica serves, one of `enginehouse_testing.prompts.ROLLOUT_MODELS`; None: there is no replica.
        breaks: it leaves no usable replica behind.
        ends: its process may end: the judge is then given the `WorkerError` that the controller made of it.
        fresh: it runs in a process in which no engine was before.
    """

    model: str | None = "tied"
    breaks: bool = False
    ends: bool = False
    fresh: bool = False


def wrong(detail: str) -> Measured:
    """The finding where something is wrong that has no size."""
    return Measured(float("inf"), detail)


def found(seen: Sequence[Seen]) -> Measured:
    """The judge of an act that judges what it sees itself."""
    measured: Measured = seen[0].value
    return measured


def outputs_of(seen: Sequence[Seen]) -> list[Any]:
    """What the output ranks saw, in the order of their shards."""
    return [one.value for one in sorted(seen, key=lambda one: one.dp_rank) if one.is_output]
