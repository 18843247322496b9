"""The worker's side of environments in separate processes; `worker_pool` is the controller's side.

A worker plays tasks in the same way as the controller does without workers. It requests tokens from the controller's
fleet, because only the fleet knows which replicas are free and which are lost. The tokens go directly from the replica
to the worker, and the rows go directly from the worker to the trainer. The controller gets only the rewards
(`ScoredGroup`) and references to the rows (`DistributedBatch`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from enginehouse.controller import Worker, register
from enginehouse.controller.exchange import AnswerQueue
from enginehouse.data.columns import NOTES
from enginehouse.fleet.request_batches import RequestBatch
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.episodes.failures import describe_error
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import TaskKind, make_environment, make_runner
from enginehouse_rl.episodes.samples import encode_texts
from enginehouse_rl.episodes.scored_group import ScoredGroup, build_rows
from enginehouse_rl.episodes.traces import EpisodeActivity
from enginehouse_rl.episodes.watchdog import LoopWatchdog
from enginehouse_rl.episodes.worker_messages import EpisodeJob, WorkerOrders, WorkerReport, repeated_log
from enginehouse_rl.rewards.weighted import WeightedRewards

if TYPE_CHECKING:
    from enginehouse.data import Batch
    from enginehouse.engines.environment import Task
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult
    from enginehouse.fleet.request_batches import AnswerBatch
    from enginehouse_rl.episodes.runner import EpisodeRunner
    from enginehouse_rl.plan.plan import PlayPlan

SILENT_SECONDS = 10.0
"""After this many seconds, a worker reports even without news. If half of a call's time limit is shorter, the worker
reports after that time, because a worker that is silent for the whole time limit counts as hanging."""


class EnvironmentWorker(Worker):
    """Plays tasks for the controller. `kinds` are the kinds of tasks, by name."""

    _tokenizer: Any = None
    _watchdog: LoopWatchdog | None = None
    _watches = False

    def __init__(self, plan: PlayPlan, kinds: Mapping[str, TaskKind]):
        model = plan.config.model
        self._tokenizer = load_tokenizer(model.path, model.trust_remote_code, plan.config.data.template_arguments)
        self._environment = make_environment(plan)
        self._rewards = WeightedRewards(plan)
        self._plan = plan
        self._watches = not plan.is_single_turn
        self._begin(kinds, plan.config.cluster.call_timeout_seconds)

    def _begin(self, kinds: Mapping[str, TaskKind], call_seconds: float) -> None:
        self._kinds = kinds
        self._silent_seconds = min(SILENT_SECONDS, call_seconds / 2)
        self._activity = EpisodeActivity()
        self._warnings = _WarningCollector()
        logging.getLogger().addHandler(self._warnings)
        self._early_orders: dict[int, tuple[WorkerOrders, Sequence[Batch]]] = {}  # orders that came before their turn
        self._orders_taken = 0
        self._runners: dict[str, EpisodeRunner] = {}
        self._jobs: dict[tuple[str, int], EpisodeJob] = {}  # by kind and serial number
        self._playing: dict[int, asyncio.Task[tuple[int, ScoredGroup] | None]] = {}
        self._answers = AnswerQueue[tuple[int, ScoredGroup] | None]()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[AnswerBatch, int]]] = {}
        self._requests: dict[str, list[tuple[int, GenerateRequest]]] = {name: [] for name in kinds}
        self._forgotten: list[int] = []
        self._scoring: list[int] = []
        self._error: BaseException | None = None

    @register(collect="distributed")
    async def exchange(self, orders: WorkerOrders, *drawn: Batch) -> tuple[WorkerReport, Batch]:
        """Accept orders, and return a report once there is news (see `AnswerQueue`).

        `drawn` has one batch for each answer in the orders: the tokens and logprobs of this answer.
        """
        if self._watches and self._watchdog is None:
            self._watchdog = LoopWatchdog(asyncio.get_running_loop(), self._plan.config.environment.name)
        question = self._answers.ask()
        self._early_orders[orders.number] = orders, drawn
        while (next_orders := self._early_orders.pop(self._orders_taken, None)) is not None:
            self._orders_taken += 1
            self._take_up(*next_orders)
        tasks = await self._answers.ended(question, self._silent_seconds)
        if self._error is not None:
            raise self._error
        return self._report(
            [result for task in tasks if not task.cancelled() and (result := task.result()) is not None]
        )

    @register
    def describe(self) -> dict[str, Any]:
        return {"rank": self.context.rank, "node": self.context.node, "pid": os.getpid()}

    def shutdown(self) -> None:
        """Stop the reward processes."""
        logging.getLogger().removeHandler(self._warnings)
        if self._watchdog is not None:
            self._watchdog.close()
        self._rewards.close()

    # Handling orders

    def _take_up(self, orders: WorkerOrders, drawn: Sequence[Batch]) -> None:
        for answer, places, rows in zip(orders.answers, orders.places, drawn, strict=True):
            joined_answer = answer.join(rows)
            for number, place in places.items():
                if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result((joined_answer, place))
        for number, error in orders.failures.items():
            if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                waiting.set_exception(error)
        for kind in orders.counted_kinds:
            if (runner := self._runners.get(kind)) is not None:
                runner.failures.warn_again()
        for job in orders.plays:
            self._jobs[job.kind, job.task.serial] = job
            running = self._playing[job.number] = asyncio.get_running_loop().create_task(self._play(job))
            running.add_done_callback(partial(self._forget, job))
            self._answers.add(running)
        for number in orders.cancelled:
            if number in self._playing:
                self._playing[number].cancel()

    # Playing jobs

    async def _play(self, job: EpisodeJob) -> tuple[int, ScoredGroup] | None:
        try:
            if (runner := self._runners.get(job.kind)) is None:
                runner = self._runners[job.kind] = self._make_runner(job.kind)
            return job.number, await runner.play_group(job.task, partial(self._note_scoring, job.number))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # this error ends the run
            self._error = self._error or error
            self._answers.speak()
            return None

    def _forget(self, job: EpisodeJob, running: asyncio.Task[Any]) -> None:
        """Forget a job that has ended, even if it was cancelled before it began."""
        del self._playing[job.number]
        if self._jobs.get((job.kind, job.task.serial)) is job:
            del self._jobs[job.kind, job.task.serial]

    def _make_runner(self, kind: str) -> EpisodeRunner:
        make_policy = partial(self._make_policy, kind)
        return make_runner(self._plan, self._environment, make_policy, self._rewards, self._kinds[kind], self._activity)

    def _make_policy(self, kind: str, task: Task) -> FleetPolicy:
        job = self._jobs[kind, task.serial]
        return FleetPolicy(_WorkerTokens(self, kind), self._tokenizer, self._kinds[kind].sampling, job.name, job.seed)

    def _note_scoring(self, number: int) -> None:
        self._scoring.append(number)
        self._answers.speak()

    async def draw(self, kind: str, request: GenerateRequest) -> GenerateResult:
        """Let the controller's fleet answer a request, as `RolloutFleet.generate` does."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._requests[kind].append((number, request))
        self._answers.speak()
        try:
            answer, place = await waiting
        finally:
            if self._waiting.pop(number, None) is not None:
                self._forgotten.append(number)
                self._answers.speak()
        return answer.result(place, request.id)

    def _report(self, ended_groups: Sequence[tuple[int, ScoredGroup]]) -> tuple[WorkerReport, Batch]:
        requests_by_kind = {
            kind: RequestBatch.pack(
                [request for _, request in requests], [f"{number} {request.id}" for number, request in requests]
            )
            for kind, requests in self._requests.items()
            if requests
        }
        rows, notes = _split_notes([group for _, group in ended_groups if group.kept])
        report = WorkerReport(
            requests=requests_by_kind,
            forgotten=self._forgotten,
            scoring=self._scoring,
            ended=[(number, group.rewards, group.kept) for number, group in ended_groups],
            notes=notes,
            failed={kind: runner.take_counts() for kind, runner in self._runners.items()},
            last_errors={
                kind: describe_error(runner.last_error)
                for kind, runner in self._runners.items()
                if runner.last_error is not None
            },
            warnings=self._warnings.take(),
            activity=self._activity,
            now=time.monotonic(),
        )
        self._requests = {name: [] for name in self._kinds}
        self._forgotten, self._scoring = [], []
        return report, rows


class _WarningCollector(logging.Handler):
    """Collects the warnings of enginehouse and its plugins, which the controller then logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._collected: deque[tuple[int, str]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        is_first_party = record.name.startswith(("enginehouse.", "enginehouse_"))
        if is_first_party and record.name != repeated_log.name:  # the controller may log to it in this process
            self._collected.append((record.levelno, self.format(record)))

    def take(self) -> list[tuple[int, str]]:
        """Return the warnings collected since the last call."""
        return [self._collected.popleft() for _ in range(len(self._collected))]


class _WorkerTokens:
    """Replaces the fleet for a policy in a worker, and passes the policy's requests to the controller."""

    def __init__(self, worker: EnvironmentWorker, kind: str):
        self._worker, self._kind = worker, kind

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._worker.draw(self._kind, request)


def _split_notes(groups: Sequence[ScoredGroup]) -> tuple[Batch, dict[str, Sequence[Any]]]:
    """Return the rows of groups, with texts as bytes. Columns that contain Python objects are returned separately."""
    batch = encode_texts(build_rows(groups)).drop(["group"])
    return batch.drop(NOTES), {name: batch[name] for name in NOTES}
