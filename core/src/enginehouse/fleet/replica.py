"""A fleet's records of its replicas: state, generated tokens and busy time."""

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
    """No replica is left that generates."""


@dataclass(slots=True, eq=False)
class FleetReplica(Seat):
    """A replica of a fleet.

    Attributes:
        waits: True if the replica could not get the served version, and waits for the next update.
        version: weight version that the replica was verified to serve; None: the model with which it started.
    """

    waits: bool = False
    version: int | None = None


def make_replicas_lost(name: str, replicas: Sequence[FleetReplica]) -> ReplicasLost:
    """Return the error for a fleet that has no replica left. The message states the cause of each replica's death."""
    deaths = "\n".join(f"- replica {replica.number}: {replica.death or replica.state}" for replica in replicas)
    return ReplicasLost(f"no replica of {name} is left to generate:\n{deaths}")


@dataclass(slots=True)
class ReplicaCounts:
    """Sums over a replica's requests: the number of tokens, the number of decoding steps (the number of tokens of a
    request's longest completion), and the seconds until the answer."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    def count(self, tokens: int, steps: int, seconds: float) -> None:
        self.tokens += tokens
        self.steps += steps
        self.seconds += seconds


@dataclass(slots=True)
class FleetMetrics:
    """Counts of a fleet since its metrics were last read.

    Attributes:
        retries: number of requests that were sent to another replica.
        queued: maximum number of samples that waited for a replica.
    """

    retries: int = 0
    queued: int = 0
    drawn: defaultdict[int, ReplicaCounts] = field(default_factory=lambda: defaultdict(ReplicaCounts))

    def slowest(self, busy: Mapping[int, float]) -> dict[str, float]:
        """Return the slowest replica, `slowest_replica`, and the factor by which it takes longer than the others,
        `slowest`.

        A replica with more work takes longer for a request, and a replica with less work generates fewer tokens per
        second. A slow replica does both, so the smaller of the two factors counts. Empty unless two replicas have
        generated tokens.
        """
        drawn = {number: counts for number, counts in self.drawn.items() if counts.steps and busy.get(number)}
        if len(drawn) < 2:
            return {}
        by_request = {number: counts.seconds / counts.steps for number, counts in drawn.items()}
        by_token = {number: busy[number] / counts.tokens for number, counts in drawn.items()}

        def compare(number: int) -> float:
            kinds = ((figures[number], [figures[other] for other in drawn if other != number])
                     for figures in (by_request, by_token))  # fmt: skip
            return min(own / max(statistics.median(others), 1e-9) for own, others in kinds)

        slowest = max(drawn, key=compare)
        return {"slowest": compare(slowest), "slowest_replica": float(slowest)}


FLEET = -1
"""Number that stands for the whole fleet in a `BusyClock`. The fleet is busy while a request is in progress."""


@dataclass(slots=True)
class BusyClock:
    """Measures the busy time of each replica and of the fleet."""

    begun: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def set_busy(self, busy: set[int]) -> None:
        """Mark the replicas in `busy` as busy and all others as idle."""
        now = time.perf_counter()
        for number in busy - self.begun.keys():
            self.begun[number] = now
        for number in self.begun.keys() - busy:
            self.seconds[number] = self.seconds.get(number, 0.0) + now - self.begun.pop(number)

    def busy_seconds(self, number: int) -> float:
        begun = self.begun.get(number)
        return self.seconds.get(number, 0.0) + (0.0 if begun is None else time.perf_counter() - begun)


class ReplicaStatus(NamedTuple):
    """A rollout replica's state, for display.

    Attributes:
        state: `"up"`, `"restarting"`, `"without weights"`, `"lost"` or `"out"`.
        version: served weight version; None before the first.
        requests: number of requests in progress.
    """

    number: int
    state: str
    version: int | None
    requests: int
