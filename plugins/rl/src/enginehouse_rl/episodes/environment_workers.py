"""Environments in processes of their own, whose rows stay where they are made.

A worker plays tasks as the controller would. It asks for tokens, and the controller's fleet has them drawn, since it
alone knows which replica is free and which was lost; what was drawn goes from the replica to the worker, and the rows
that come of it from the worker to whoever trains on them. The controller learns of them what `ScoredGroup` and a
`DistributedBatch` hold.

Both sides talk by calls of one method: each brings what is new for the worker, and ends once there is something to say.

A worker whose process dies or is stuck takes with it the episodes that it had under way: `rollout.on_failure` says what
becomes of them (`Failures`), the others go on, and it is started again. What was played before stays.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.controller import ResourcePool, Worker, WorkerGroup, WorkerSpec, register
from enginehouse.controller.errors import ClusterLost, ControllerError, GroupClosed
from enginehouse.controller.exchange import AnswerQueue, Exchange
from enginehouse.controller.supervision import RESTARTS, Seat, Supervisor, run_at_once
from enginehouse.data import Batch
from enginehouse.data.columns import NOTES
from enginehouse.errors import EnginehouseError
from enginehouse.fleet.request_batches import RequestBatch
from enginehouse.plugin.secrets import escape_references, insert_variables
from enginehouse.roles.launch import start_seconds
from enginehouse_rl.data.rendering import load_tokenizer
from enginehouse_rl.episodes.failures import Failures, GivenUp, WorkerLost, failed_metrics, in_short, in_words
from enginehouse_rl.episodes.runner import FleetPolicy, TaskKind, make_environment, make_runner
from enginehouse_rl.episodes.samples import as_bytes
from enginehouse_rl.episodes.scored_group import ScoredGroup, rows_here
from enginehouse_rl.episodes.traces import UnderWay
from enginehouse_rl.episodes.watchdog import LoopWatchdog
from enginehouse_rl.rewards.weighted import WeightedRewards

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.environment import Task
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult
    from enginehouse.fleet.fleet import RolloutFleet
    from enginehouse.fleet.request_batches import AnswerBatch
    from enginehouse.fleet.router import Flight
    from enginehouse_rl.config.schema import OnFailure
    from enginehouse_rl.episodes.runner import EpisodeRunner
    from enginehouse_rl.plan.plan import PlayPlan

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""A worker that has nothing to say for so long, or for half of what a call may take, says that: one that says nothing
for longer than a call may take is stuck."""

MOST_LINES = 20
"""Of what is known of a worker that is lost, so many lines are shown."""


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
    counted: list[str] = field(default_factory=list)
    plays: list[EpisodeJob] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    answers: list[AnswerBatch] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerReport:
    """What is new for the controller.

    Attributes:
        asked: requests to be drawn, by kind of play; their ids begin with their numbers.
        forgotten: requests that nobody waits for any more, by number.
        scoring: plays whose episodes are drawn, and are being scored, by number.
        ended: plays, by number, with the rewards of their episodes and whether these are trained on: the rows of those
            that are come beside this, in the same order.
        notes: of these rows, the columns of objects that are not texts.
        failed: episodes that failed, by kind of play and reason; see `EpisodeRunner.counted`.
        last: what failed last, in words, by kind of play.
        warnings: what was logged for people, each with its level: nobody reads a worker's own log.
        under_way: what its episodes are at.
        now: when this was said, by its clock, which times in the notes are of.
    """

    asked: dict[str, RequestBatch]
    forgotten: list[int]
    scoring: list[int]
    ended: list[tuple[int, tuple[float, ...], bool]]
    notes: Mapping[str, Sequence[Any]]
    failed: Mapping[str, Counter[str]]
    last: Mapping[str, str]
    warnings: list[tuple[int, str]]
    under_way: UnderWay
    now: float


class EnvironmentWorker(Worker):
    """Plays tasks; see the module.

    Args:
        plan: of the run.
        kinds: what tasks are played for, by name.
    """

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
        self._under_way = UnderWay()
        self._warnings = _Warnings()
        logging.getLogger().addHandler(self._warnings)
        self._came: dict[int, tuple[WorkerOrders, Sequence[Batch]]] = {}  # before their turn
        self._taken_up = 0
        self._players: dict[str, EpisodeRunner] = {}
        self._plays: dict[tuple[str, int], EpisodeJob] = {}  # by kind and serial number
        self._playing: dict[int, asyncio.Task[tuple[int, ScoredGroup] | None]] = {}
        self._answers = AnswerQueue[tuple[int, ScoredGroup] | None]()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[AnswerBatch, int]]] = {}
        self._asked: dict[str, list[tuple[int, GenerateRequest]]] = {name: [] for name in kinds}
        self._forgotten: list[int] = []
        self._scoring: list[int] = []
        self._error: BaseException | None = None

    @register(collect="distributed")
    async def exchange(self, orders: WorkerOrders, *drawn: Batch) -> tuple[WorkerReport, Batch]:
        """Take up orders, and say what is new once anything is, as `AnswerQueue` does.

        Args:
            orders: what is new.
            drawn: tokens and logprobs of each of its answers.
        """
        if self._watches and self._watchdog is None:
            self._watchdog = LoopWatchdog(asyncio.get_running_loop(), self._plan.config.environment.name)
        asking = self._answers.ask()
        self._came[orders.number] = orders, drawn
        while (next_ones := self._came.pop(self._taken_up, None)) is not None:
            self._taken_up += 1
            self._take_up(*next_ones)
        tasks = await self._answers.ended(asking, self._silent_seconds)
        if self._error is not None:
            raise self._error
        return self._report([ended for task in tasks if not task.cancelled() and (ended := task.result()) is not None])

    @register
    def describe(self) -> dict[str, Any]:
        """What runs here, for reports."""
        return {"rank": self.context.rank, "node": self.context.node, "pid": os.getpid()}

    def shutdown(self) -> None:
        """End the processes of the reward."""
        logging.getLogger().removeHandler(self._warnings)
        if self._watchdog is not None:
            self._watchdog.close()
        self._rewards.close()

    # What comes

    def _take_up(self, orders: WorkerOrders, drawn: Sequence[Batch]) -> None:
        for answer, places, rows in zip(orders.answers, orders.places, drawn, strict=True):
            whole = answer.join(rows)
            for number, place in places.items():
                if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result((whole, place))
        for number, error in orders.failures.items():
            if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                waiting.set_exception(error)
        for kind in orders.counted:
            if (player := self._players.get(kind)) is not None:
                player.failures.warn_again()
        for play in orders.plays:
            self._plays[play.kind, play.task.serial] = play
            playing = self._playing[play.number] = asyncio.get_running_loop().create_task(self._play(play))
            playing.add_done_callback(partial(self._forget, play))
            self._answers.add(playing)
        for number in orders.cancelled:
            if number in self._playing:
                self._playing[number].cancel()

    # What is done

    async def _play(self, play: EpisodeJob) -> tuple[int, ScoredGroup] | None:
        try:
            if (player := self._players.get(play.kind)) is None:
                player = self._players[play.kind] = self._player(play.kind)
            return play.number, await player.played(play.task, partial(self._note_scoring, play.number))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # it ends the run
            self._error = self._error or error
            self._answers.speak()
            return None

    def _forget(self, play: EpisodeJob, playing: asyncio.Task[Any]) -> None:
        """Forget a play that has ended, also one that was cancelled before it began."""
        del self._playing[play.number]
        if self._plays.get((play.kind, play.task.serial)) is play:
            del self._plays[play.kind, play.task.serial]

    def _player(self, kind: str) -> EpisodeRunner:
        policy_of = partial(self._policy_of, kind)
        return make_runner(self._plan, self._environment, policy_of, self._rewards, self._kinds[kind], self._under_way)

    def _policy_of(self, kind: str, task: Task) -> FleetPolicy:
        play = self._plays[kind, task.serial]
        return FleetPolicy(_Asking(self, kind), self._tokenizer, self._kinds[kind].sampling, play.name, play.seed)

    def _note_scoring(self, number: int) -> None:
        self._scoring.append(number)
        self._answers.speak()

    async def draw(self, kind: str, request: GenerateRequest) -> GenerateResult:
        """As `RolloutFleet.generate`."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._asked[kind].append((number, request))
        self._answers.speak()
        try:
            answer, place = await waiting
        finally:
            if self._waiting.pop(number, None) is not None:
                self._forgotten.append(number)
                self._answers.speak()
        return answer.result(place, request.id)

    def _report(self, ended: Sequence[tuple[int, ScoredGroup]]) -> tuple[WorkerReport, Batch]:
        asked = {
            kind: RequestBatch.pack(
                [request for _, request in requests], [f"{number} {request.id}" for number, request in requests]
            )
            for kind, requests in self._asked.items()
            if requests
        }
        rows, notes = _rows_and_notes([played for _, played in ended if played.kept])
        report = WorkerReport(
            asked=asked,
            forgotten=self._forgotten,
            scoring=self._scoring,
            ended=[(number, played.rewards, played.kept) for number, played in ended],
            notes=notes,
            failed={kind: player.counted() for kind, player in self._players.items()},
            last={kind: in_words(player.last) for kind, player in self._players.items() if player.last is not None},
            warnings=self._warnings.taken(),
            under_way=self._under_way,
            now=time.monotonic(),
        )
        self._asked = {name: [] for name in self._kinds}
        self._forgotten, self._scoring = [], []
        return report, rows


class _Warnings(logging.Handler):
    """Keeps what enginehouse and its plugins log for people, so that the controller says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[tuple[int, str]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.startswith(("enginehouse.", "enginehouse_"))
        if ours and record.name != __name__:  # in one process with the controller this is what that says of them
            self._kept.append((record.levelno, self.format(record)))

    def taken(self) -> list[tuple[int, str]]:
        """Those that were kept since this was asked for last."""
        return [self._kept.popleft() for _ in range(len(self._kept))]


class _Asking:
    """What a policy takes for a fleet."""

    def __init__(self, worker: EnvironmentWorker, kind: str):
        self._worker, self._kind = worker, kind

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `RolloutFleet.generate`."""
        return await self._worker.draw(self._kind, request)


def _rows_and_notes(played: Sequence[ScoredGroup]) -> tuple[Batch, dict[str, Sequence[Any]]]:
    """Rows of tasks, with texts as bytes, and what is told beside them."""
    batch = as_bytes(rows_here(played)).drop(["group"])
    return batch.drop(NOTES), {name: batch[name] for name in NOTES}


@dataclass(slots=True)
class _RunningEpisode:
    """A play, as the controller knows it."""

    task: Task
    scoring: Callable[[], None]
    played: asyncio.Future[ScoredGroup]


class WorkersLost(ControllerError):
    """Nobody is left to play tasks."""


class _NotBegun(Exception):
    """A task waited for a worker that does not come back: another may play it."""


@dataclass(slots=True, eq=False)
class _WorkerProcess:
    """What is under way with a worker's process, as long as it lives.

    Attributes:
        seat: the worker.
        orders: what it is to be told.
        came: what was drawn for it, by its numbers.
        plays: what it plays, or is to play.
        flights: what is drawn for it, by its numbers.
        sent: how many calls were.
        under_way: what its episodes are at, as it said last.
    """

    seat: _Seat
    orders: WorkerOrders = field(default_factory=WorkerOrders)
    came: list[tuple[int, Flight]] = field(default_factory=list)
    plays: dict[int, _RunningEpisode] = field(default_factory=dict)
    flights: dict[int, tuple[RolloutFleet, Flight]] = field(default_factory=dict)
    sent: int = 0
    under_way: UnderWay = field(default_factory=UnderWay)


@dataclass(slots=True, eq=False)
class _Seat(Seat):
    """A worker, whichever process it is.

    Attributes:
        process: what is under way with it; of one that is being started again, what waits.
    """

    process: _WorkerProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = _WorkerProcess(self)


class EnvironmentWorkers:
    """Has tasks played by workers. Everything but `player` and what ends it runs on one event loop.

    Args:
        groups: one an `EnvironmentWorker`, of one process.
        kinds: as the workers know them.
        on_failure: what is done about the episodes of a worker that is lost.
        restarts: how often a worker is started again without having ended a play in between; then it is out.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        kinds: Mapping[str, TaskKind],
        on_failure: OnFailure = "fail",
        restarts: int = RESTARTS,
    ):
        self._seats, self._kinds = [_Seat(number, group) for number, group in enumerate(groups)], kinds
        self._failures = {kind: Failures(on_failure) for kind in kinds}
        self._goes_on = on_failure != "fail"
        self._supervisor = Supervisor(self._seats, restarts, "having played anything", self._begin, self._note_change)
        self._loop: asyncio.AbstractEventLoop | None = None  # of who plays
        self._numbers = itertools.count()
        self._exchange = Exchange[_WorkerProcess](self._turn, self._come, self._fail)
        self._fleets: dict[str, RolloutFleet] = {}
        self._failed: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._last: dict[str, BaseException] = {}
        self.closed = False

    @property
    def under_way(self) -> UnderWay:
        """What episodes are at, as the workers said last."""
        return UnderWay.sum(seat.process.under_way for seat in self._seats)

    def describe(self) -> list[dict[str, Any]]:
        """Each worker's process, for reports."""
        described = [seat.group.call("describe")[0] for seat in self._seats]
        return [{**one, "rank": number} for number, one in enumerate(described)]

    def player(self, kind: str, fleet: RolloutFleet, named: Callable[[Task], tuple[str, int]]) -> WorkersRunner:
        """What plays tasks of a kind.

        Args:
            kind: what for.
            fleet: draws their tokens.
            named: of each task, what begins its requests' ids, and the seed of the first.
        """
        self._fleets[kind] = fleet
        return WorkersRunner(self, kind, self._kinds[kind].sampling.n, named)

    async def play(self, kind: str, task: Task, name: str, seed: int, scoring: Callable[[], None]) -> ScoredGroup:
        """Have a task played by the worker with the fewest. What a worker that is lost had under way is played again
        from the same seeds, where `retry` says so: it need not be what the worker died of.

        Raises:
            EpisodeFailed: the worker was lost, and the run is to end for it.
            WorkersLost: there is no worker any more.
            WorkerError: something in the worker ended the run.
        """
        failures, lost = self._failures[kind], 0
        while True:
            try:
                return await self._play_once(EpisodeJob(next(self._numbers), kind, task, name, seed), scoring)
            except WorkerLost as error:
                self._last[kind] = error
                try:
                    failures.add(in_short(task), self._kinds[kind].sampling.n, lost, error)
                except GivenUp:
                    return ScoredGroup(task, (), False)
                lost += 1
            except _NotBegun:
                continue

    async def _play_once(self, play: EpisodeJob, scoring: Callable[[], None]) -> ScoredGroup:
        living = [seat for seat in self._seats if seat.state != "out"]
        if not living:
            deaths = "\n".join(f"- {self._fate(seat)}" for seat in self._seats)
            raise WorkersLost(f"no environment worker is left to play {in_short(play.task)}:\n{deaths}")
        process = min(living, key=lambda seat: (seat.state != "serving", len(seat.process.plays))).process
        played = asyncio.get_running_loop().create_future()
        process.plays[play.number] = _RunningEpisode(play.task, scoring, played)
        process.orders.plays.append(play)
        self._exchange.soon()
        try:
            return await played
        finally:
            if process.plays.pop(play.number, None) is not None:
                process.orders.cancelled.append(play.number)
                self._exchange.soon()

    def metrics(self, kind: str) -> dict[str, float]:
        """Episodes of a kind that failed since this was asked for last, by reason, of which workers warn again; and how
        often a worker was begun to be started again, whatever it played."""
        for seat in self._seats:
            seat.process.orders.counted.append(kind)
        counts, self._failed[kind] = self._failed[kind], Counter()
        failures = self._failures[kind]
        failures.warn_again()
        restarts = float(self._supervisor.take_restarts())
        return {**failed_metrics(counts + failures.counted()), "worker_restarts": restarts}

    def last(self, kind: str) -> BaseException | None:
        """What failed last."""
        return self._last.get(kind)

    # What is sent

    def _turn(self) -> None:
        if self.closed:
            return
        for seat in self._seats:
            process = seat.process
            new = process.came or process.orders.plays or process.orders.cancelled
            if seat.state == "serving" and (new or (process.plays and not self._exchange.has_call(process))):
                self._send(process)

    def _send(self, process: _WorkerProcess) -> None:
        came, process.came = process.came, []
        orders, process.orders = process.orders, WorkerOrders()
        orders.number, process.sent = process.sent, process.sent + 1
        places: dict[int, dict[int, int]] = {}  # of each answer
        drawn: list[DistributedBatch] = []
        for number, flight in came:
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

    # What comes back

    async def _come(self, process: _WorkerProcess, came: tuple[WorkerReport, DistributedBatch]) -> None:
        self._take(process, *came)

    async def _fail(self, process: _WorkerProcess, error: Exception) -> None:
        seat = process.seat
        if seat.process is not process:  # its loss is known
            return
        if seat.group.broken is None or self.closed or isinstance(error, ClusterLost):
            _fail(process, error)
        else:
            self._lose(seat, error)

    def _take(self, process: _WorkerProcess, report: WorkerReport, rows: DistributedBatch) -> None:
        process.under_way = report.under_way
        ahead = time.monotonic() - report.now
        for kind, counts in report.failed.items():
            self._failed[kind].update(counts)
        self._last.update({kind: EnginehouseError(said) for kind, said in report.last.items()})
        for level, said in report.warnings:
            log.log(level, "%s", said)
        for kind, requests in report.asked.items():
            for request in requests.unpack():
                self._submit(process, kind, request)
        for number in report.forgotten:
            if (flying := process.flights.pop(number, None)) is not None:
                fleet, flight = flying
                fleet.forget(flight)
        for number in report.scoring:
            if (playing := process.plays.get(number)) is not None:
                playing.scoring()
        traces = [None if trace is None else trace.shifted(ahead) for trace in report.notes["trace"]]
        rows = rows.with_columns(**{**report.notes, "trace": traces})
        if report.ended:
            process.seat.restarts = 0
        of_episode, episodes, end = rows["episode"], 0, 0
        for number, rewards, kept in report.ended:
            episodes += len(rewards) * kept
            begin, end = end, int(torch.searchsorted(of_episode, episodes))
            if (playing := process.plays.pop(number, None)) is not None and not playing.played.done():
                own = rows.slice(begin, end) if kept else None
                playing.played.set_result(ScoredGroup(playing.task, rewards, kept, rows=own))

    def _submit(self, process: _WorkerProcess, kind: str, request: GenerateRequest) -> None:
        said, _, name = request.id.partition(" ")
        number, fleet = int(said), self._fleets[kind]

        def ended(flight: Flight) -> None:
            process.flights.pop(number, None)
            process.came.append((number, flight))
            self._exchange.soon()

        process.flights[number] = fleet, fleet.submit(replace(request, id=name), ended)

    # Life and death

    def _lose(self, seat: _Seat, error: Exception) -> None:
        """A worker's process died, or is stuck: what it had under way has failed, and it is started again."""
        process, seat.process = seat.process, _WorkerProcess(seat)
        for fleet, flight in process.flights.values():
            fleet.forget(flight)
        unsent = {play.number for play in process.orders.plays}
        others = len(process.plays) - len(unsent) - 1
        beside = f" and {others} other{'s' * (others > 1)}" if others > 0 else ""
        why = error.reason if isinstance(error, GroupClosed) else str(error)
        _fail(process, WorkerLost(f"the environment worker that played it{beside} is lost: {why}"), unsent)
        death = why.splitlines()[0]
        if self._goes_on:
            self._loop = asyncio.get_running_loop()
            self._supervisor.lose(seat, seat.member, death, _shortened(why))
        else:
            seat.state, seat.death = "out", death

    def _begin(self, seat: _Seat) -> str:
        seat.state = "serving"
        return ""

    def _note_change(self, seat: _Seat) -> None:
        """Go on with a worker that is back, or has what waited for it played by others; from its restart's thread."""

        def go_on() -> None:
            if seat.state == "out":
                _fail(seat.process, _NotBegun())
            self._exchange.soon()

        assert self._loop is not None  # a worker was lost
        with suppress(RuntimeError):  # the loop was closed: nobody plays any more
            self._loop.call_soon_threadsafe(go_on)

    def _fate(self, seat: _Seat) -> str:
        """Say why a worker is out."""
        return f"{seat.group.name} {self._supervisor.vain_restarts(seat)}" if self._goes_on else seat.death

    def shutdown(self) -> None:
        """End every worker."""
        self.closed = True
        self._supervisor.shutdown()


def _fail(process: _WorkerProcess, error: Exception, unsent: Collection[int] = ()) -> None:
    """Tell who waits for what a process plays; of `unsent` that it was not begun."""
    for number, playing in process.plays.items():
        if not playing.played.done():
            playing.played.set_exception(_NotBegun() if number in unsent else error)


def _shortened(text: str) -> str:
    """The first line of an error, and the last ones: what the worker logged, where it was."""
    first, *others = text.splitlines()
    return "\n".join([first, *others[-MOST_LINES:]])


class WorkersRunner:
    """Plays tasks of a kind by `EnvironmentWorkers`; used as a `EpisodeRunner` is."""

    def __init__(self, workers: EnvironmentWorkers, kind: str, samples: int, named: Callable[[Task], tuple[str, int]]):
        self.samples = samples
        self._workers, self._kind, self._named = workers, kind, named

    async def played(self, task: Task, scoring: Callable[[], None] = lambda: None) -> ScoredGroup:
        """See `EpisodeRunner.played`."""
        return await self._workers.play(self._kind, task, *self._named(task), scoring)

    def metrics(self) -> dict[str, float]:
        """See `EpisodeRunner.metrics`."""
        return self._workers.metrics(self._kind)

    @property
    def last(self) -> BaseException | None:
        """What failed last."""
        return self._workers.last(self._kind)


@contextmanager
def environment_workers(plan: PlayPlan, kinds: Mapping[str, TaskKind]) -> Iterator[EnvironmentWorkers]:
    """Start the environment workers of a plan; end them on the way out. Ray has to be there.

    Args:
        plan: of the run.
        kinds: what tasks are played for, by name.
    """
    cluster = plan.config.cluster
    processes = plan.config.environment.processes
    kinds = {name: replace(kind, tasks=math.ceil(kind.tasks / processes)) for name, kind in kinds.items()}
    rewards = tuple(replace(one, arguments=escape_references(insert_variables(one.arguments))) for one in plan.rewards)
    arguments = escape_references(insert_variables(plan.environment.arguments))
    environment = replace(plan.environment, arguments=arguments)
    plan = replace(plan, rewards=rewards, environment=environment)  # nodes may lack the variables
    pool = ResourcePool([processes], timeout=start_seconds(cluster.call_timeout_seconds), name="environment")
    started: list[WorkerGroup] = []

    def start(number: int, place: ResourcePool) -> WorkerGroup:
        group = WorkerGroup(
            place,
            WorkerSpec(EnvironmentWorker, plan, kinds).options(distributed=False),
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
        workers = EnvironmentWorkers(groups, kinds, plan.config.rollout.on_failure)
        try:
            yield workers
        finally:
            workers.shutdown()
    finally:
        pool.shutdown()
