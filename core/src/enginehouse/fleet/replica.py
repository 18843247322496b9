"""What a fleet knows of its replicas, and what happens to them while rows are drawn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.supervision import Seat


class ReplicasLost(ControllerError):
    """Nobody is left to draw rows."""


@dataclass(slots=True, eq=False)
class Replica(Seat):
    """What is known of a replica.

    Attributes:
        waits: whether it was not brought to the version served, and waits for the next.
        version: weight version it was verified to serve; None: the model it was started with.
    """

    waits: bool = False
    version: int | None = None


def nobody_left(name: str, replicas: Sequence[Replica]) -> ReplicasLost:
    """The error that no replica of a fleet draws rows any more, and why."""
    deaths = "\n".join(f"- replica {replica.number}: {replica.death or replica.state}" for replica in replicas)
    return ReplicasLost(f"no replica of {name} is left to draw rows:\n{deaths}")


@dataclass(slots=True)
class Drawn:
    """What a replica drew.

    Attributes:
        tokens: of all completions.
        steps: tokens of the longest completion of each request.
        seconds: that its requests took, each from when it was given.
    """

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    def count(self, tokens: int, steps: int, seconds: float) -> None:
        """A request was drawn."""
        self.tokens += tokens
        self.steps += steps
        self.seconds += seconds


@dataclass(slots=True)
class FleetMetrics:
    """What a fleet counted since its metrics were last read.

    Attributes:
        retries: of requests.
        queued: most samples that waited for a replica.
        drawn: by replica.
    """

    retries: int = 0
    queued: int = 0
    drawn: defaultdict[int, Drawn] = field(default_factory=lambda: defaultdict(Drawn))

    def slowest(self, busy: Mapping[int, float]) -> dict[str, float]:
        """Which replica is slowest, `slowest_replica`, and `slowest`: how many times as long as others it takes.

        A replica with more to do takes longer for a request, and one with less draws fewer tokens a second: slow is who
        does both, so the smaller of both figures counts. Empty unless two have drawn something.

        Args:
            busy: by replica, seconds in which it had something to do.
        """
        drawn = {number: one for number, one in self.drawn.items() if one.steps and busy.get(number)}
        if len(drawn) < 2:
            return {}
        by_request = {number: one.seconds / one.steps for number, one in drawn.items()}
        by_token = {number: busy[number] / one.tokens for number, one in drawn.items()}

        def times(number: int) -> float:
            kinds = ((figures[number], [figures[other] for other in drawn if other != number])
                     for figures in (by_request, by_token))  # fmt: skip
            return min(own / max(statistics.median(others), 1e-9) for own, others in kinds)

        slowest = max(drawn, key=times)
        return {"slowest": times(slowest), "slowest_replica": float(slowest)}


FLEET = -1
"""In a `Watch`: the fleet, which has something to do as long as a request is under way."""


@dataclass(slots=True)
class Watch:
    """How long each replica, and the fleet, had something to do."""

    begun: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def set_busy(self, busy: set[int]) -> None:
        """These are busy now, the others are not."""
        now = time.perf_counter()
        for number in busy - self.begun.keys():
            self.begun[number] = now
        for number in self.begun.keys() - busy:
            self.seconds[number] = self.seconds.get(number, 0.0) + now - self.begun.pop(number)

    def until_now(self, number: int) -> float:
        """How long this one had."""
        begun = self.begun.get(number)
        return self.seconds.get(number, 0.0) + (0.0 if begun is None else time.perf_counter() - begun)


class ReplicaSeen(NamedTuple):
    """What is shown of a rollout replica.

    Attributes:
        number: which it is.
        state: `"up"`, `"restarting"`, `"without weights"`, `"lost"` or `"out"`.
        version: the weight version it serves; None: none yet.
        requests: those it was given and has not answered.
    """

    number: int
    state: str
    version: int | None
    requests: int
