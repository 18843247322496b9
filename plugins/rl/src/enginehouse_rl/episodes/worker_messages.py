"""The messages between a controller and its environment workers."""

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
"""The logger with which the controller repeats warnings of its workers. A worker in the controller's process does not
report the warnings of this logger, because they would be repeated without end."""


@dataclass(frozen=True, slots=True)
class EpisodeJob:
    """A task to play.

    Attributes:
        number: Number that identifies the job.
        name: Prefix of the ids of the task's requests.
        seed: Seed of the task's first request.
    """

    number: int
    kind: str
    task: Task
    name: str
    seed: int


@dataclass(slots=True)
class WorkerOrders:
    """Orders for a worker.

    Attributes:
        number: Position of this message among all orders for the worker. The worker handles messages by ascending
            number, because they may arrive in a different sequence.
        counted_kinds: Kinds of tasks whose failures the controller has just reported as metrics. For each of these
            kinds, the worker warns of the next failure of each reason again.
        cancelled: Numbers of the jobs to cancel.
        answers: Answers to requests, without the tokens, which come separately.
        places: For each answer, a mapping from the number of a request to the index of its result in the answer.
        failures: Errors of the requests that failed, by the number of the request.
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
    """A worker's report to the controller.

    Attributes:
        requests: New requests for tokens, by kind of task. The id of a request begins with the number of the request.
        forgotten: Numbers of the requests that nobody waits for any more.
        scoring: Numbers of the jobs whose episodes are generated and are being scored.
        ended: For each job that ended: its number, the rewards of its episodes, and True if the run trains on them. The
            rows of the jobs that the run trains on come separately, in the same order.
        notes: Those columns of the rows in `ended` that contain Python objects. Columns of texts are not included.
        failed: Number of episodes that failed, by kind of task and reason; see `EpisodeRunner.take_counts`.
        last_errors: Description of the latest failure, by kind of task.
        warnings: Logged warnings with their levels. The controller logs them, because nobody reads a worker's log.
        activity: Number of episodes in progress and what they wait for.
        now: Time of the report by the worker's clock, which the times in `notes` use too.
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
