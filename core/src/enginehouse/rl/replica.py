"""What a fleet knows of its replicas, and what happens to them while rows are drawn."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from enginehouse.controller.errors import ControllerError
from enginehouse.weights.members import Member

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup

State = Literal["serving", "returned", "lost", "out"]
"""Of a replica: takes requests; was started again and lacks weights; is gone, perhaps being started; stays gone."""


class ReplicasLost(ControllerError):
    """Nobody is left to draw rows."""


@dataclass(slots=True)
class Replica:
    """What is known of a replica.

    Attributes:
        number: which it is.
        group: its group of one process.
        incarnation: counts its processes, from 0.
        state: what it is good for.
        restarts: begun since it last drew something.
        death: why it went, the last time.
        waits: whether it was not brought to the version served, and waits for the next.
        restarting: starts it again, or did.
        version: weight version it was verified to serve; None: the model it was started with.
    """

    number: int
    group: WorkerGroup
    incarnation: int = 0
    state: State = "serving"
    restarts: int = 0
    death: str = ""
    waits: bool = False
    restarting: threading.Thread | None = None
    version: int | None = None

    @property
    def comes_back(self) -> bool:
        """Whether it is being started again, or was just now."""
        return self.state in ("lost", "returned") and self.restarting is not None and self.restarting.is_alive()

    @property
    def member(self) -> Member:
        """Its process of this moment."""
        return Member(self.number, self.incarnation, self.group)


def nobody_left(name: str, replicas: Sequence[Replica]) -> ReplicasLost:
    """The error that no replica of a fleet draws rows any more, and why."""
    deaths = "\n".join(f"- replica {replica.number}: {replica.death or replica.state}" for replica in replicas)
    return ReplicasLost(f"no replica of {name} is left to draw rows:\n{deaths}")


@dataclass(frozen=True, slots=True)
class Changed:
    """Something happened to a replica."""

    number: int
    what: Literal["lost", "returned", "caught up"]


@dataclass(slots=True)
class FleetMetrics:
    """What a fleet counted since its metrics were last read."""

    restarts: int = 0
    retries: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0

    def add(self, batch: FleetMetrics) -> None:
        """Take in those of a batch that was drawn."""
        self.retries += batch.retries
        self.busy_seconds += batch.busy_seconds
        self.seconds += batch.seconds
        self.queued = max(self.queued, batch.queued)


@dataclass(slots=True)
class Watch:
    """How long each replica had something to do."""

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
