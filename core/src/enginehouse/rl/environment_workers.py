"""Environments in processes of their own, whose rows stay where they are made.

A worker plays tasks as the controller would. It asks for tokens, and the controller's fleet has them drawn, since it
alone knows which replica is free and which was lost; what was drawn goes from the replica to the worker, and the rows
that come of it from the worker to whoever trains on them. The controller learns of them what `Played` and a
`DistributedBatch` hold.

Both sides talk by calls of one method: each brings what is new for the worker, and ends once there is something to say.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.config.secrets import from_environment, literal
from enginehouse.controller import ResourcePool, Worker, WorkerGroup, WorkerSpec, register
from enginehouse.data import Batch
from enginehouse.data.rendering import load_tokenizer
from enginehouse.errors import EnginehouseError
from enginehouse.rl.columns import Requests
from enginehouse.rl.episodes import NOTES, Played, batch_of
from enginehouse.rl.placement import start_seconds
from enginehouse.rl.player import FleetPolicy, Kind, failed_metrics, in_words, make_environment, player_of
from enginehouse.rl.rewards.weighted import WeightedRewards
from enginehouse.rl.samples import as_bytes

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan
    from enginehouse.controller import DistributedBatch
    from enginehouse.controller.future import Future
    from enginehouse.engines.environment import Group, Task
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult
    from enginehouse.rl.columns import Answer
    from enginehouse.rl.fleet import RolloutFleet
    from enginehouse.rl.player import Player
    from enginehouse.rl.router import Flight

log = logging.getLogger(__name__)

GATHERED_SECONDS = 0.01
"""How long a group that has ended waits for those that end just after it, so that their rows lie together."""
SILENT_SECONDS = 10.0
"""A worker that has nothing to say for so long, or for half of what a call may take, says that: one that says nothing
for longer than a call may take is stuck."""


@dataclass(frozen=True, slots=True)
class Play:
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
class Orders:
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
    plays: list[Play] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What is new for the controller.

    Attributes:
        asked: requests to be drawn, by kind of play; their ids begin with their numbers.
        forgotten: requests that nobody waits for any more, by number.
        scoring: plays whose first episodes are drawn, and are being scored, by number.
        ended: plays, by number, with the rewards of their episodes and whether these are trained on: the rows of those
            that are come beside this, in the same order.
        notes: of these rows, the columns of objects that are not texts.
        failed: episodes that failed, by kind of play and reason; see `Player.counted`.
        last: what failed last, in words, by kind of play.
        warnings: what was logged for people, each with its level: nobody reads a worker's own log.
    """

    asked: dict[str, Requests]
    forgotten: list[int]
    scoring: list[int]
    ended: list[tuple[int, tuple[float, ...], bool]]
    notes: Mapping[str, Sequence[Any]]
    failed: Mapping[str, Counter[str]]
    last: Mapping[str, str]
    warnings: list[tuple[int, str]]


class EnvironmentWorker(Worker):
    """Plays tasks; see the module.

    Args:
        plan: of the run.
        kinds: what tasks are played for, by name.
    """

    _tokenizer: Any = None

    def __init__(self, plan: Plan, kinds: Mapping[str, Kind]):
        model = plan.config.model
        self._tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        self._environment = make_environment(plan)
        self._rewards = WeightedRewards(plan)
        self._plan = plan
        self._begin(kinds, plan.config.cluster.call_timeout_seconds)

    def _begin(self, kinds: Mapping[str, Kind], call_seconds: float) -> None:
        self._kinds = kinds
        self._silent_seconds = min(SILENT_SECONDS, call_seconds / 2)
        self._warnings = _Warnings()
        logging.getLogger("enginehouse").addHandler(self._warnings)
        self._came: dict[int, tuple[Orders, Sequence[Batch]]] = {}  # before their turn
        self._taken_up = 0
        self._players: dict[str, Player] = {}
        self._plays: dict[tuple[str, int], Play] = {}  # by kind and serial number
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[tuple[Answer, int]]] = {}
        self._asked: dict[str, list[tuple[int, GenerateRequest]]] = {name: [] for name in kinds}
        self._forgotten: list[int] = []
        self._scoring: list[int] = []
        self._ended: list[tuple[int, Played]] = []
        self._error: BaseException | None = None
        self._saying: asyncio.Future[None] | None = None
        self._due = False

    @register(collect="distributed")
    async def exchange(self, orders: Orders, *drawn: Batch) -> tuple[Report, Batch]:
        """Take up orders, and say what is new once anything is. Who asks again meanwhile releases this.

        Args:
            orders: what is new.
            drawn: tokens and logprobs of each of its answers.
        """
        self._release()
        self._came[orders.number] = orders, drawn
        while (next_ones := self._came.pop(self._taken_up, None)) is not None:
            self._taken_up += 1
            self._take_up(*next_ones)
        if self._playing and not self._due:
            saying = self._saying = asyncio.get_running_loop().create_future()
            silence = asyncio.get_running_loop().call_later(self._silent_seconds, _release, saying)
            await saying
            silence.cancel()
            if self._saying is saying:
                self._saying = None
        if self._error is not None:
            raise self._error
        return self._report()

    @register
    def describe(self) -> dict[str, Any]:
        """What runs here, for reports."""
        return {"rank": self.context.rank, "node": self.context.node, "pid": os.getpid()}

    def shutdown(self) -> None:
        """End the processes of the reward."""
        logging.getLogger("enginehouse").removeHandler(self._warnings)
        self._rewards.close()

    # What comes

    def _take_up(self, orders: Orders, drawn: Sequence[Batch]) -> None:
        for answer, places, rows in zip(orders.answers, orders.places, drawn, strict=True):
            whole = answer.joined(rows)
            for number, place in places.items():
                if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result((whole, place))
        for number, error in orders.failures.items():
            if (waiting := self._waiting.pop(number, None)) is not None and not waiting.done():
                waiting.set_exception(error)
        for kind in orders.counted:
            if (player := self._players.get(kind)) is not None:
                player.warn_again()
        for play in orders.plays:
            self._plays[play.kind, play.task.serial] = play
            playing = self._playing[play.number] = asyncio.get_running_loop().create_task(self._play(play))
            playing.add_done_callback(partial(self._note_end, play))
        for number in orders.cancelled:
            if number in self._playing:
                self._playing[number].cancel()

    # What is done

    async def _play(self, play: Play) -> None:
        try:
            if (player := self._players.get(play.kind)) is None:
                player = self._players[play.kind] = self._player(play.kind)
            played = await player.played(play.task, partial(self._note_scoring, play.number))
            self._ended.append((play.number, played))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # it ends the run
            self._error = self._error or error

    def _note_end(self, play: Play, playing: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before it began."""
        del self._playing[play.number]
        if self._plays.get((play.kind, play.task.serial)) is play:
            del self._plays[play.kind, play.task.serial]
        self._say(at_once=not self._playing or self._error is not None)

    def _player(self, kind: str) -> Player:
        policy_of = partial(self._policy_of, kind)
        return player_of(self._plan, self._environment, policy_of, self._rewards, self._kinds[kind])

    def _policy_of(self, kind: str, task: Task) -> FleetPolicy:
        play = self._plays[kind, task.serial]
        return FleetPolicy(_Asking(self, kind), self._tokenizer, self._kinds[kind].sampling, play.name, play.seed)

    def _note_scoring(self, number: int) -> None:
        self._scoring.append(number)
        self._say()

    async def draw(self, kind: str, request: GenerateRequest) -> GenerateResult:
        """As `RolloutFleet.generate`."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._asked[kind].append((number, request))
        self._say()
        try:
            answer, place = await waiting
        finally:
            if self._waiting.pop(number, None) is not None:
                self._forgotten.append(number)
                self._say()
        return answer.result(place, request.id)

    # What is said

    def _say(self, at_once: bool = True) -> None:
        """There is something new: it is said with what else is new in this turn of the loop, or soon."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._speak) if at_once else loop.call_later(GATHERED_SECONDS, self._speak)

    def _speak(self) -> None:
        if self._ended or self._scoring or self._forgotten or self._error or any(self._asked.values()):
            self._due = True
        if self._due or not self._playing:
            self._release()

    def _release(self) -> None:
        if self._saying is not None:
            _release(self._saying)

    def _report(self) -> tuple[Report, Batch]:
        self._due = False
        asked = {
            kind: Requests.pack(
                [request for _, request in requests], [f"{number} {request.id}" for number, request in requests]
            )
            for kind, requests in self._asked.items()
            if requests
        }
        groups = [played.group for _, played in self._ended if played.kept and played.group is not None]
        rows, notes = _rows_and_notes(groups)
        report = Report(
            asked=asked,
            forgotten=self._forgotten,
            scoring=self._scoring,
            ended=[(number, played.rewards, played.kept) for number, played in self._ended],
            notes=notes,
            failed={kind: player.counted() for kind, player in self._players.items()},
            last={kind: in_words(player.last) for kind, player in self._players.items() if player.last is not None},
            warnings=self._warnings.taken(),
        )
        self._asked = {name: [] for name in self._kinds}
        self._forgotten, self._scoring, self._ended = [], [], []
        return report, rows


class _Warnings(logging.Handler):
    """Keeps what is logged for people, so that the controller says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[tuple[int, str]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__:  # in one process with the controller this is what that says of them
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


def _rows_and_notes(groups: Sequence[Group]) -> tuple[Batch, dict[str, Sequence[Any]]]:
    """Rows of groups, with texts as bytes, and what is told beside them."""
    batch = as_bytes(batch_of(groups)).drop(["group"])
    return batch.drop(NOTES), {name: batch[name] for name in NOTES}


def _release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


@dataclass(slots=True)
class _Playing:
    """A play, as the controller knows it."""

    task: Task
    scoring: Callable[[], None]
    played: asyncio.Future[Played]


class EnvironmentWorkers:
    """Has tasks played by the workers of a group. Everything but `player` runs on one event loop.

    Args:
        group: of `EnvironmentWorker`s.
        kinds: as the workers know them.
    """

    def __init__(self, group: WorkerGroup, kinds: Mapping[str, Kind]):
        self._group, self._kinds = group, kinds
        self._orders = [Orders() for _ in range(group.world_size)]
        self._came: list[list[tuple[int, Flight]]] = [[] for _ in range(group.world_size)]
        self._calls = [0] * group.world_size  # in flight
        self._sent = [0] * group.world_size
        self._numbers = itertools.count()
        self._plays: list[dict[int, _Playing]] = [{} for _ in range(group.world_size)]
        self._flights: dict[tuple[int, int], tuple[RolloutFleet, Flight]] = {}  # by rank and the worker's number
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._fleets: dict[str, RolloutFleet] = {}
        self._failed: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.last: dict[str, str] = {}
        self.closed = False

    def describe(self) -> list[dict[str, Any]]:
        """Each worker's process, for reports."""
        return self._group.call("describe")

    def player(self, kind: str, fleet: RolloutFleet, named: Callable[[Task], tuple[str, int]]) -> WorkersPlayer:
        """What plays tasks of a kind.

        Args:
            kind: what for.
            fleet: draws their tokens.
            named: of each task, what begins its requests' ids, and the seed of the first.
        """
        self._fleets[kind] = fleet
        return WorkersPlayer(self, kind, self._kinds[kind].sampling.n, named)

    async def play(self, kind: str, task: Task, name: str, seed: int, scoring: Callable[[], None]) -> Played:
        """Have a task played by the worker with the fewest.

        Raises:
            WorkerError: the worker died, or something in it ended the run.
        """
        rank = min(range(self._group.world_size), key=lambda rank: len(self._plays[rank]))
        number, played = next(self._numbers), asyncio.get_running_loop().create_future()
        self._plays[rank][number] = _Playing(task, scoring, played)
        self._orders[rank].plays.append(Play(number, kind, task, name, seed))
        self._soon()
        try:
            return await played
        finally:
            if self._plays[rank].pop(number, None) is not None:
                self._orders[rank].cancelled.append(number)
                self._soon()

    def counted(self, kind: str) -> Counter[str]:
        """Episodes of a kind that failed since this was asked for last, by reason; workers warn of later ones again."""
        for orders in self._orders:
            orders.counted.append(kind)
        counts, self._failed[kind] = self._failed[kind], Counter()
        return counts

    # What is sent

    def _soon(self) -> None:
        if not (self._scheduled or self.closed):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        for rank, orders in enumerate(self._orders):
            came, self._came[rank] = self._came[rank], []
            if came or orders.plays or orders.cancelled or (self._plays[rank] and not self._calls[rank]):
                self._orders[rank] = Orders()
                self._send(rank, orders, came)

    def _send(self, rank: int, orders: Orders, came: Sequence[tuple[int, Flight]]) -> None:
        orders.number, self._sent[rank] = self._sent[rank], self._sent[rank] + 1
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
        call: Future | Exception
        try:
            call = self._group.execute_rank_async(rank, "exchange", orders, *drawn)
        except Exception as error:
            call = error
        self._calls[rank] += 1
        self._tasks.add(task := asyncio.get_running_loop().create_task(self._collect(rank, call)))
        task.add_done_callback(self._tasks.discard)

    # What comes back

    async def _collect(self, rank: int, call: Future | Exception) -> None:
        try:
            if isinstance(call, Exception):
                raise call
            report, rows = await call
            self._take(rank, report, rows)
        except Exception as error:
            for playing in self._plays[rank].values():
                if not playing.played.done():
                    playing.played.set_exception(error)
        finally:
            self._calls[rank] -= 1
            self._soon()

    def _take(self, rank: int, report: Report, rows: DistributedBatch) -> None:
        for kind, counts in report.failed.items():
            self._failed[kind].update(counts)
        self.last.update(report.last)
        for level, said in report.warnings:
            log.log(level, "%s", said)
        for kind, requests in report.asked.items():
            for request in requests.unpack():
                self._submit(rank, kind, request)
        for number in report.forgotten:
            if (flying := self._flights.pop((rank, number), None)) is not None:
                fleet, flight = flying
                fleet.forget(flight)
        for number in report.scoring:
            if (playing := self._plays[rank].get(number)) is not None:
                playing.scoring()
        rows = rows.with_columns(**report.notes)
        of_episode, episodes, end = rows["episode"], 0, 0
        for number, rewards, kept in report.ended:
            episodes += len(rewards) * kept
            begin, end = end, int(torch.searchsorted(of_episode, episodes))
            if (playing := self._plays[rank].pop(number, None)) is not None and not playing.played.done():
                own = rows.slice(begin, end) if kept else None
                playing.played.set_result(Played(playing.task, rewards, kept, rows=own))

    def _submit(self, rank: int, kind: str, request: GenerateRequest) -> None:
        said, _, name = request.id.partition(" ")
        number, fleet = int(said), self._fleets[kind]

        def ended(flight: Flight) -> None:
            self._flights.pop((rank, number), None)
            self._came[rank].append((number, flight))
            self._soon()

        self._flights[rank, number] = fleet, fleet.submit(replace(request, id=name), ended)


class WorkersPlayer:
    """Plays tasks of a kind by `EnvironmentWorkers`; used as a `Player` is."""

    def __init__(self, workers: EnvironmentWorkers, kind: str, samples: int, named: Callable[[Task], tuple[str, int]]):
        self.samples = samples
        self._workers, self._kind, self._named = workers, kind, named

    async def played(self, task: Task, scoring: Callable[[], None] = lambda: None) -> Played:
        """See `Player.played`."""
        return await self._workers.play(self._kind, task, *self._named(task), scoring)

    def metrics(self) -> dict[str, float]:
        """See `Player.metrics`."""
        return failed_metrics(self._workers.counted(self._kind))

    @property
    def last(self) -> BaseException | None:
        """What failed last."""
        said = self._workers.last.get(self._kind)
        return None if said is None else EnginehouseError(said)


@contextmanager
def environment_workers(plan: Plan, kinds: Mapping[str, Kind]) -> Iterator[EnvironmentWorkers]:
    """Start the environment workers of a plan; end them on the way out. Ray has to be there.

    Args:
        plan: of the run.
        kinds: what tasks are played for, by name.
    """
    cluster = plan.config.cluster
    processes = plan.config.environment.processes
    kinds = {name: replace(kind, tasks=math.ceil(kind.tasks / processes)) for name, kind in kinds.items()}
    rewards = tuple(replace(one, arguments=literal(from_environment(one.arguments))) for one in plan.rewards)
    arguments = literal(from_environment(plan.environment_arguments))
    plan = replace(plan, rewards=rewards, environment_arguments=arguments)  # nodes may lack the variables
    pool = ResourcePool([processes], timeout=start_seconds(cluster), name="environment")
    try:
        group = WorkerGroup(
            pool,
            WorkerSpec(EnvironmentWorker, plan, kinds).options(distributed=False),
            name="environment",
            timeout=cluster.call_timeout_seconds,
            start_timeout=start_seconds(cluster),
            seed=plan.config.train.seed,
            threads=cluster.threads_per_process or 1,
        )
        workers = EnvironmentWorkers(group, kinds)
        try:
            yield workers
        finally:
            workers.closed = True
            group.shutdown()
    finally:
        pool.shutdown()
