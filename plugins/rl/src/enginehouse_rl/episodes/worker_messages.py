"""What a controller and its environment workers tell each other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.engines.environment import Task
    from enginehouse.fleet.request_batches import AnswerBatch, RequestBatch
    from enginehouse_rl.episodes.traces import EpisodeActivity

repeated_log = logging.getLogger(__name__)
"""The controller's logger for the warnings of its workers. A worker in the same process does not report them again."""


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """A task to be played.

    Attributes:
        number: counts what a controller has played.
        kind: what for.
        task: it.
        name: begins its requests' ids.
        seed: of its first request.
    """

    number: int
    kind: str
    task: Task
    name: str
    seed: int


@dataclass(slots=True)
class WorkerOrders:
    """What is new for a worker.

    Attributes:
        number: they are taken up in this order, whichever comes first.
        counted: kinds of play whose failures were asked for: later ones are warned of again.
        plays: tasks to be played.
        cancelled: plays that are to end, by number.
        answers: what was drawn, without its tokens; those come beside it.
        places: of each answer, its requests by number, and their places in it.
        failures: requests that were not drawn, by number.
    """

    number: int = 0
    counted_kinds: list[str] = field(default_factory=list)
    plays: list[EpisodeJob] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    answers: list[AnswerBatch] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerReport:
    """What is new for the controller.

    Attributes:
        requests: those to be drawn, by kind of play; their ids begin with their numbers.
        forgotten: requests that nobody waits for any more, by number.
        scoring: plays whose episodes are drawn, and are being scored, by number.
        ended: plays, by number, with the rewards of their episodes and whether these are trained on: the rows of those
            that are come beside this, in the same order.
        notes: of these rows, the columns of objects that are not texts.
        failed: episodes that failed, by kind of play and reason; see `EpisodeRunner.take_counts`.
        last_errors: what failed last, in words, by kind of play.
        warnings: what was logged for people, each with its level: nobody reads a worker's own log.
        activity: what its episodes are at.
        now: when this was said, by its clock, which times in the notes are of.
    """

    requests: dict[str, RequestBatch]
    forgotten: list[int]
    scoring: list[int]
    ended: list[tuple[int, tuple[float, ...], bool]]
    notes: Mapping[str, Sequence[Any]]
    failed: Mapping[str, Counter[str]]
    last_errors: Mapping[str, str]
    warnings: list[tuple[int, str]]
    activity: EpisodeActivity
    now: float
