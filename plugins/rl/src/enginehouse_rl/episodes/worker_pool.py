"""The controller's side of environments in separate processes. Rows stay in the processes that make them.

The controller calls one method of the worker. Each call brings orders, and returns once the worker has something to
report.

If a worker's process dies or hangs, `rollout.on_failure` decides what happens to the episodes that it was playing
(`Failures`). The other workers continue, and the lost worker is restarted. Episodes that it had finished remain valid.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.controller.errors import ClusterLost, ControllerError, GroupClosed
from enginehouse.controller.exchange import Exchange
from enginehouse.controller.supervision import RESTARTS, Seat, Supervisor, run_at_once
from enginehouse.errors import EnginehouseError
from enginehouse.plugin.secrets import escape_references, insert_variables
from enginehouse.roles.launch import start_seconds
from enginehouse_rl.episodes.environment_worker import EnvironmentWorker
from enginehouse_rl.episodes.failures import Failures, GivenUp, WorkerLost, count_failures, describe_task
from enginehouse_rl.episodes.scored_group import ScoredGroup
from enginehouse_rl.episodes.traces import EpisodeActivity
from enginehouse_rl.episodes.worker_messages import EpisodeJob, WorkerOrders, WorkerReport, repeated_log

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.environment import Task
    from enginehouse.engines.rollout import GenerateRequest
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse.fleet.router import Flight
    from enginehouse_rl.config.schema import OnFailure
    from enginehouse_rl.episodes.runner import TaskKind
    from enginehouse_rl.plan.plan import PlayPlan

MOST_LINES = 20
"""Maximum number of lines that follow the first line in the report of a lost worker."""


@dataclass(slots=True)
class _RunningEpisode:
    """The controller's record of a task that a worker plays."""

    task: Task
    scoring: Callable[[], None]
    outcome: asyncio.Future[ScoredGroup]


class WorkersLost(ControllerError):
    """No worker is left to play tasks."""


class _NotBegun(Exception):
    """A task had not begun when its worker was lost, so another worker may play it."""


@dataclass(slots=True, eq=False)
class _WorkerProcess:
    """State of the communication with one process of a worker. A restarted worker gets a new process.

    Attributes:
        flights_ended: Ended requests of the worker whose results were not sent to it yet, each with its number.
        flights: Requests of the worker that the fleet has not answered yet, by number.
        activity: Activity of the worker's episodes, as last reported.
    """

    seat: _WorkerSeat
    orders: WorkerOrders = field(default_factory=WorkerOrders)
    flights_ended: list[tuple[int, Flight]] = field(default_factory=list)
    plays: dict[int, _RunningEpisode] = field(default_factory=dict)
    flights: dict[int, tuple[RolloutFleet, Flight]] = field(default_factory=dict)
    sent: int = 0
    activity: EpisodeActivity = field(default_factory=EpisodeActivity)


@dataclass(slots=True, eq=False)
class _WorkerSeat(Seat):
    """A worker's place in the pool; `process` is its current process or, while the worker restarts, the next one."""

    process: _WorkerProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = _WorkerProcess(self)


class EnvironmentWorkerPool:
    """Lets workers play tasks. All methods except `make_runner` and `shutdown` run on one event loop.

    Args:
        groups: Worker groups, each of which has a single worker, an `EnvironmentWorker`.
        kinds: Kinds of tasks by name, as the workers know them.
        on_failure: Policy for the episodes of a lost worker.
        restarts: A worker that was restarted this many times without finishing a task in between is not restarted
            again.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        kinds: Mapping[str, TaskKind],
        on_failure: OnFailure = "fail",
        restarts: int = RESTARTS,
    ):
        self._seats, self._kinds = [_WorkerSeat(number, group) for number, group in enumerate(groups)], kinds
        self._failures = {kind: Failures(on_failure) for kind in kinds}
        self._goes_on = on_failure != "fail"
        self._supervisor = Supervisor(self._seats, restarts, "having played anything", self._begin, self._note_change)
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop of the plays, once a worker was lost
        self._numbers = itertools.count()
        self._exchange = Exchange[_WorkerProcess](self._send_new, self._receive, self._fail)
        self._fleets: dict[str, RolloutFleet] = {}
        self._failed: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._last: dict[str, BaseException] = {}
        self.closed = False

    @property
    def activity(self) -> EpisodeActivity:
        """Sum of the activities that the workers reported last."""
        return EpisodeActivity.sum(seat.process.activity for seat in self._seats)

    def describe(self) -> list[dict[str, Any]]:
        processes = [seat.group.call("describe")[0] for seat in self._seats]
        return [{**process, "rank": number} for number, process in enumerate(processes)]

    def make_runner(
        self, kind: str, fleet: RolloutFleet, name_request: Callable[[Task], tuple[str, int]]
    ) -> WorkerPoolRunner:
        """Return the runner that plays tasks of a kind. Takes the arguments of `EpisodeRunners.make_runner`."""
        self._fleets[kind] = fleet
        return WorkerPoolRunner(self, kind, self._kinds[kind].sampling.n, name_request)

    async def play(self, kind: str, task: Task, name: str, seed: int, scoring: Callable[[], None]) -> ScoredGroup:
        """Let the worker with the fewest tasks play a task.

        If a worker is lost, any of its tasks may be the cause. Under the failure policy `retry`, all of them are
        therefore played again with the same seeds.

        Raises:
            EpisodeFailed: The worker was lost, and the policy ends the run.
            WorkersLost: No worker is left.
            WorkerError: An error in the worker ended the run.
        """
        failures, lost = self._failures[kind], 0
        while True:
            try:
                return await self._play_once(EpisodeJob(next(self._numbers), kind, task, name, seed), scoring)
            except WorkerLost as error:
                self._last[kind] = error
                try:
                    failures.add(describe_task(task), self._kinds[kind].sampling.n, lost, error)
                except GivenUp:
                    return ScoredGroup(task, (), False)
                lost += 1
            except _NotBegun:
                continue

    async def _play_once(self, job: EpisodeJob, scoring: Callable[[], None]) -> ScoredGroup:
        living = [seat for seat in self._seats if seat.state != "out"]
        if not living:
            deaths = "\n".join(f"- {self._describe_death(seat)}" for seat in self._seats)
            raise WorkersLost(f"no environment worker is left to play {describe_task(job.task)}:\n{deaths}")
        process = min(living, key=lambda seat: (seat.state != "serving", len(seat.process.plays))).process
        outcome = asyncio.get_running_loop().create_future()
        process.plays[job.number] = _RunningEpisode(job.task, scoring, outcome)
        process.orders.plays.append(job)
        self._exchange.soon()
        try:
            return await outcome
        finally:
            if process.plays.pop(job.number, None) is not None:
                process.orders.cancelled.append(job.number)
                self._exchange.soon()

    def metrics(self, kind: str) -> dict[str, float]:
        """Return two counts since the last call: the failed episodes of a kind by reason, and the restarts of workers.

        After this call, the workers warn of the next failure of each reason again.
        """
        for seat in self._seats:
            seat.process.orders.counted_kinds.append(kind)
        counts, self._failed[kind] = self._failed[kind], Counter()
        failures = self._failures[kind]
        failures.warn_again()
        restarts = float(self._supervisor.take_restarts())
        return {**count_failures(counts + failures.take_counts()), "worker_restarts": restarts}

    def last_error(self, kind: str) -> BaseException | None:
        return self._last.get(kind)

    # Sending orders

    def _send_new(self) -> None:
        if self.closed:
            return
        for seat in self._seats:
            process = seat.process
            new = process.flights_ended or process.orders.plays or process.orders.cancelled
            if seat.state == "serving" and (new or (process.plays and not self._exchange.has_call(process))):
                self._send(process)

    def _send(self, process: _WorkerProcess) -> None:
        flights_ended, process.flights_ended = process.flights_ended, []
        orders, process.orders = process.orders, WorkerOrders()
        orders.number, process.sent = process.sent, process.sent + 1
        places: dict[int, dict[int, int]] = {}  # places of the requests in each answer
        drawn: list[DistributedBatch] = []
        for number, flight in flights_ended:
            if flight.answer is None:
                assert flight.error is not None
                orders.failures[number] = flight.error
                continue
            answer, place = flight.answer
            if id(answer) not in places:
                assert answer.apart is not None
                drawn.append(answer.apart)
                orders.answers.append(replace(answer, apart=None))
                orders.places.append(places.setdefault(id(answer), {}))
            places[id(answer)][number] = place
        self._exchange.send(process, lambda: process.seat.group.execute_rank_async(0, "exchange", orders, *drawn))

    # Handling reports

    async def _receive(self, process: _WorkerProcess, answer: tuple[WorkerReport, DistributedBatch]) -> None:
        self._take_report(process, *answer)

    async def _fail(self, process: _WorkerProcess, error: Exception) -> None:
        seat = process.seat
        if seat.process is not process:  # the loss of this worker is already known
            return
        if seat.group.broken is None or self.closed or isinstance(error, ClusterLost):
            _fail(process, error)
        else:
            self._lose(seat, error)

    def _take_report(self, process: _WorkerProcess, report: WorkerReport, rows: DistributedBatch) -> None:
        process.activity = report.activity
        ahead = time.monotonic() - report.now
        for kind, counts in report.failed.items():
            self._failed[kind].update(counts)
        self._last.update({kind: EnginehouseError(text) for kind, text in report.last_errors.items()})
        for level, text in report.warnings:
            repeated_log.log(level, "%s", text)
        for kind, requests in report.requests.items():
            for request in requests.unpack():
                self._submit(process, kind, request)
        for number in report.forgotten:
            if (flying := process.flights.pop(number, None)) is not None:
                fleet, flight = flying
                fleet.forget(flight)
        for number in report.scoring:
            if (playing := process.plays.get(number)) is not None:
                playing.scoring()
        traces = [None if trace is None else trace.shift(ahead) for trace in report.notes["trace"]]
        rows = rows.with_columns(**{**report.notes, "trace": traces})
        if report.ended:
            process.seat.restarts = 0
        episode_of_row, episodes, end = rows["episode"], 0, 0
        for number, rewards, kept in report.ended:
            episodes += len(rewards) * kept
            begin, end = end, int(torch.searchsorted(episode_of_row, episodes))
            if (playing := process.plays.pop(number, None)) is not None and not playing.outcome.done():
                group_rows = rows.slice(begin, end) if kept else None
                playing.outcome.set_result(ScoredGroup(playing.task, rewards, kept, rows=group_rows))

    def _submit(self, process: _WorkerProcess, kind: str, request: GenerateRequest) -> None:
        prefix, _, name = request.id.partition(" ")
        number, fleet = int(prefix), self._fleets[kind]

        def note_ended(flight: Flight) -> None:
            process.flights.pop(number, None)
            process.flights_ended.append((number, flight))
            self._exchange.soon()

        process.flights[number] = fleet, fleet.submit(replace(request, id=name), note_ended)

    # Loss and restart of workers

    def _lose(self, seat: _WorkerSeat, error: Exception) -> None:
        """Fail the tasks that a dead or hanging worker was playing, and restart the worker."""
        process, seat.process = seat.process, _WorkerProcess(seat)
        for fleet, flight in process.flights.values():
            fleet.forget(flight)
        unsent = {job.number for job in process.orders.plays}
        other_tasks = len(process.plays) - len(unsent) - 1
        beside = f" and {other_tasks} other task{'s' * (other_tasks > 1)}" if other_tasks > 0 else ""
        reason = error.reason if isinstance(error, GroupClosed) else str(error)
        _fail(process, WorkerLost(f"the environment worker that played it{beside} is lost: {reason}"), unsent)
        death = reason.splitlines()[0]
        if self._goes_on:
            self._loop = asyncio.get_running_loop()
            self._supervisor.lose(seat, seat.member, death, _shorten(reason))
        else:
            seat.state, seat.death = "out", death

    def _begin(self, seat: _WorkerSeat) -> str:
        seat.state = "serving"
        return ""

    def _note_change(self, seat: _WorkerSeat) -> None:
        """Send orders to a worker that was restarted. If a worker is not restarted, let other workers play its tasks.

        Called from the thread that restarts workers.
        """

        def go_on() -> None:
            if seat.state == "out":
                _fail(seat.process, _NotBegun())
            self._exchange.soon()

        assert self._loop is not None  # a worker was lost
        with suppress(RuntimeError):  # the loop was closed: nobody plays any more
            self._loop.call_soon_threadsafe(go_on)

    def _describe_death(self, seat: _WorkerSeat) -> str:
        return f"{seat.group.name} {self._supervisor.vain_restarts(seat)}" if self._goes_on else seat.death

    def shutdown(self) -> None:
        self.closed = True
        self._supervisor.shutdown()


def _fail(process: _WorkerProcess, error: Exception, unsent: Collection[int] = ()) -> None:
    """Fail the tasks that a process plays. The tasks of the jobs with a number in `unsent` count as not begun."""
    for number, playing in process.plays.items():
        if not playing.outcome.done():
            playing.outcome.set_exception(_NotBegun() if number in unsent else error)


def _shorten(text: str) -> str:
    """Return the first line and the last lines of an error. The last lines are the worker's log, if it has one."""
    first, *rest = text.splitlines()
    return "\n".join([first, *rest[-MOST_LINES:]])


class WorkerPoolRunner:
    """Plays tasks of a kind in an `EnvironmentWorkerPool`, with the methods of an `EpisodeRunner`."""

    def __init__(
        self, workers: EnvironmentWorkerPool, kind: str, samples: int, name_request: Callable[[Task], tuple[str, int]]
    ):
        self.samples = samples
        self._workers, self._kind, self._name_request = workers, kind, name_request

    async def play_group(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup:
        return await self._workers.play(self._kind, task, *self._name_request(task), scoring)

    def metrics(self) -> dict[str, float]:
        return self._workers.metrics(self._kind)

    @property
    def last_error(self) -> BaseException | None:
        return self._workers.last_error(self._kind)


@contextmanager
def start_environment_workers(plan: PlayPlan, kinds: Mapping[str, TaskKind]) -> Iterator[EnvironmentWorkerPool]:
    """Start the environment workers of a plan, and stop them when the context ends. Ray must be running."""
    cluster = plan.config.cluster
    processes = plan.config.environment.processes
    kinds = {name: replace(kind, tasks=math.ceil(kind.tasks / processes)) for name, kind in kinds.items()}
    rewards = tuple(
        replace(reward, arguments=escape_references(insert_variables(reward.arguments))) for reward in plan.rewards
    )
    arguments = escape_references(insert_variables(plan.environment.arguments))
    environment = replace(plan.environment, arguments=arguments)
    plan = replace(plan, rewards=rewards, environment=environment)  # nodes may lack the variables
    pool = ResourcePool([processes], timeout=start_seconds(cluster.call_timeout_seconds), name="environment")
    started: list[WorkerGroup] = []

    def start(number: int, place: ResourcePool) -> WorkerGroup:
        group = WorkerGroup(
            place,
            WorkerSpec(EnvironmentWorker, plan, kinds).options(distributed=False, reads=[plan.config.model.path]),
            name=f"environment-{number}",
            timeout=cluster.call_timeout_seconds,
            start_timeout=start_seconds(cluster.call_timeout_seconds),
            seed=plan.config.train.seed,
            threads=cluster.threads_per_process or 1,
        )
        started.append(group)
        return group

    try:
        try:
            groups = run_at_once([partial(start, number, place) for number, place in enumerate(pool.split(processes))])
        except BaseException:
            run_at_once([group.shutdown for group in started])
            raise
        workers = EnvironmentWorkerPool(groups, kinds, plan.config.rollout.on_failure)
        try:
            yield workers
        finally:
            workers.shutdown()
    finally:
        pool.shutdown()
