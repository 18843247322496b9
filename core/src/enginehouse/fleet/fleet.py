"""The rollout, whatever it is: replicas that may die one by one, or the ranks of a group, which share a fate.

Requests go to the replica with the least to do. A replica that dies, or whose engine does, loses nothing but time: what
it held is drawn by others, it is started again in the background, and it answers again once it serves, verified, the
version that the others serve. The samples are those of an undisturbed run up to rounding, since they depend on seed and
row alone: which rows an engine computes together depends on time, and turns the last bit of a logprob, now and then a
token with it.

How requests are routed is `enginehouse.fleet.router`; how weights reach a replica, `enginehouse.weights.sync`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.controller.errors import ControllerError, RemoteError
from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.controller.ray_access import LOOK_SECONDS
from enginehouse.data import Batch, Ragged
from enginehouse.errors import first_line
from enginehouse.fleet.columns import Answer
from enginehouse.fleet.generation import in_order, seeded_requests
from enginehouse.fleet.replica import FLEET, FleetMetrics, Replica, ReplicaSeen, State, Watch, nobody_left
from enginehouse.fleet.router import Flight, Router
from enginehouse.fleet.scheduler import PrefixMemory
from enginehouse.weights.members import Member, Members, Ranks

if TYPE_CHECKING:
    from enginehouse.engines.model import Device
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult, Health, SamplingParams

log = logging.getLogger(__name__)

_STATES = {"serving": "up", "returned": "without weights", "lost": "lost", "out": "out"}
"""Of a replica, for people."""
SAMPLES_IN_FLIGHT = 512
"""Most completions a replica is given at once, where its engine does not say how many it generates (`max_running`); the
rest goes to who is free first."""
SPARE = 8
"""Where it does, it is given one more for every so many."""
ALL_IN_FLIGHT = 2**31
"""For ranks that share a fate: nothing is gained by holding back."""
RESTARTS = 3
"""How often a replica is started again without having drawn anything in between."""
HEALTH_EVERY_SECONDS = 15.0
"""How often replicas are asked whether they live."""
HEALTH_SECONDS = 60.0
"""How long a replica may take to say so."""
HURRIED_SHUTDOWN_SECONDS = 3.0
SHUTDOWN_SECONDS = 10.0
RESTART_END_SECONDS = 3.0
"""How long a restart under way is waited for at the end; then its place is taken away from it."""


class RolloutFleet:
    """Replicas of a rollout engine, in processes of their own; `over`: in those of a group. `launch` must come before
    anything else.

    Requests are awaited on one event loop, whichever that is; another may be used once none is under way.

    Args:
        spec: of a `RolloutWorker`, or a worker with its methods and its argument `replica`.
        replicas: how many.
        name: the role, for messages; a replica's group is called `name-number`.
        launcher: `"ray"`, or `"inline"` with one replica, which is never restarted.
        places: a pool with a process for each replica, which is theirs from now on; or a pool for each, which is
            somebody else's. None: a pool without GPUs.
        timeout: seconds a replica with requests under way may say nothing, or take for any other call.
        start_timeout: seconds until a replica's process, and then its engine, must be there.
        seed: the run's base seed.
        device: `"cpu"` or `"cuda"`.
        threads: threads of numeric libraries in each process.
        samples_in_flight: most completions a replica is given at once.
        restarts: how often a replica is started again without having drawn anything in between; after that it is out.
        health_every: seconds between looks at whether replicas live; they may take `HEALTH_SECONDS` to say so.

    Attributes:
        tokens_stay: whether tokens stay where they are drawn, so that only who gets their place can read them; see
            `submit`.
        catch_up: brings returned replicas to the version served (`WeightSync.catch_up`); without it they wait for the
            next update.

    Raises:
        PlacementError: the cluster does not give the places.
        WorkerError: a worker could not be built.
    """

    tokens_stay = False
    catch_up: Callable[[Members], None] | None = None
    _start_timeout: float | None = None
    _ranks: Ranks | None = None
    _pool: ResourcePool | None = None
    _numbers = itertools.count()
    """Of requests; of all fleets, as two may be over one group, and a worker knows requests by their names."""

    def __init__(
        self,
        spec: WorkerSpec,
        replicas: int,
        *,
        name: str = "rollout",
        launcher: str = "ray",
        places: ResourcePool | Sequence[ResourcePool] | None = None,
        timeout: float = 600.0,
        start_timeout: float = 300.0,
        seed: int = 0,
        device: Device = "cpu",
        threads: int = 1,
        samples_in_flight: int = SAMPLES_IN_FLIGHT,
        restarts: int = RESTARTS,
        health_every: float = HEALTH_EVERY_SECONDS,
    ):
        self._set(name, samples_in_flight, apart=launcher != "inline")
        self._start_timeout, self._most_restarts, self._health_every = start_timeout, restarts, health_every
        if places is None:
            places = ResourcePool([replicas], timeout=start_timeout, name=name)
        if isinstance(places, ResourcePool):
            self._pool, places = places, places.split(replicas)

        def start(number: int, pool: ResourcePool) -> Replica:
            own = spec.options(distributed=False)
            own.kwargs["replica"] = number
            group = WorkerGroup(
                pool, own, name=f"{name}-{number}", launcher=launcher, timeout=timeout, start_timeout=start_timeout,
                seed=seed, device=device, threads=threads,
            )  # fmt: skip
            replica = Replica(number, group)
            with self._lock:
                self._replicas.append(replica)
                self._replicas.sort(key=lambda replica: replica.number)
            if self._closing.is_set():
                group.shutdown(HURRIED_SHUTDOWN_SECONDS)
            return replica

        try:
            at_once([partial(start, number, pool) for number, pool in enumerate(places)])
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def over(cls, group: WorkerGroup) -> RolloutFleet:
        """The ranks of a group of `RolloutWorker`s, each a replica. What ends one ends all: none is started again.

        Whoever made the group shuts it down.
        """
        fleet = cls.__new__(cls)
        fleet._set(group.name, ALL_IN_FLIGHT, apart=False)
        fleet._ranks = Ranks(group)
        fleet._replicas = [Replica(rank, group, rank) for rank in range(group.world_size)]
        return fleet

    def _set(self, name: str, samples_in_flight: int, apart: bool) -> None:
        self.name = name
        self._apart = apart  # whether each replica may die alone
        self._limit = samples_in_flight
        self._engine_metrics: dict[str, float] = {}
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._hurried = False
        self._catching_up = self._held = False
        self._launches_allowed, self._launches_alone, self._launching = True, False, 0
        self._router: Router | None = None
        self._loop = EventLoop()
        self._memory = PrefixMemory()
        self._metrics = FleetMetrics()
        self._watch = Watch()
        self._seconds: dict[int, float] = {}  # what the watch said when metrics were last asked for
        self._version: int | None = None  # newest that was verified; None before the first update
        self._replicas: list[Replica] = []

    # What it is

    @property
    def world_size(self) -> int:
        """Number of replicas, whatever became of them."""
        return len(self._replicas)

    @property
    def pids(self) -> list[int]:
        """Each replica's process id, on its node."""
        return [replica.group.pids[replica.rank] for replica in self._replicas]

    @property
    def states(self) -> list[State]:
        """What each replica is good for."""
        return [replica.state for replica in self._replicas]

    def seen(self) -> list[ReplicaSeen]:
        """How each replica is, for people; from any thread, and nobody is asked."""
        router = self._router
        return [
            ReplicaSeen(
                replica.number,
                "restarting" if replica.is_started else _STATES[replica.state],
                replica.version,
                router.requests(replica.number) if router is not None else 0,
            )
            for replica in list(self._replicas)
        ]

    def describe(self) -> list[dict[str, Any]]:
        """What runs in each replica, for reports; of one that is gone, why."""
        living = self._living()
        described = dict(
            zip([member.number for member in living.members], self._call_all(living, "describe"), strict=True)
        )
        return [
            described.get(replica.number) or {"rank": replica.number, "state": replica.state, "died": replica.death}
            for replica in self._replicas
        ]

    def metrics(self) -> dict[str, float]:
        """Figures since they were last asked for, all named `rollout/...`.

        `restarts` of replicas, `retries` of requests; `replicas` that serve; `busy_seconds` of a replica on average and
        the share of the time with requests under way that is (`utilisation`); `queued`, most samples that waited for a
        replica; of several replicas the `slowest_replica`, and how many times as long as others it takes (`slowest`).
        And the engines' own, as of when they last said how they are.
        """
        with self._lock:
            metrics, self._metrics = self._metrics, FleetMetrics()
            numbers = (FLEET, *(replica.number for replica in self._replicas))
            before, self._seconds = self._seconds, {number: self._watch.until_now(number) for number in numbers}
        seconds = {number: self._seconds[number] - before.get(number, 0.0) for number in numbers}
        busy = sum(seconds[replica.number] for replica in self._replicas) / self.world_size
        return {
            "rollout/replicas": float(sum(replica.state == "serving" for replica in self._replicas)),
            "rollout/restarts": float(metrics.restarts),
            "rollout/retries": float(metrics.retries),
            "rollout/busy_seconds": busy,
            "rollout/utilisation": busy / max(seconds[FLEET], 1e-9),
            "rollout/queued": float(metrics.queued),
            **{f"rollout/{name}": value for name, value in metrics.slowest(seconds).items()},
            **self._engine_metrics,
        }

    # Calling all

    def launch(self) -> list[str]:
        """Start every replica's engine, and look after them from then on.

        Returns:
            Each engine's name and version.
        """
        engines = self._call_all(self._living(), "launch", timeout=self._start_timeout)
        if self._apart:
            threading.Thread(target=self._look_after, name=f"{self.name}-health", daemon=True).start()
        return engines

    def call(
        self, method: str, *args: Any, timeout: float | None = None, blocking: bool | None = None, **kwargs: Any
    ) -> Any:
        """Call a method, registered with the mode `one_to_all`, on every replica that lives; see `WorkerGroup.call`.

        Returns:
            One result a replica, in their order; what `Members.call` returns if not blocking.
        """
        if method == "describe":
            return self.describe()
        gathered = self._living().call(method, *args, timeout=timeout, **kwargs)
        return gathered if blocking is False else gathered.result()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Sequence[float]]]:
        """See `RolloutWorker.score`; one result a replica."""
        return self._call_all(self._living(), "score", sequences)

    def weight_state(self) -> list[Any]:
        """See `RolloutWorker.weight_state`; one result a replica that lives."""
        return self._call_all(self._living(), "weight_state")

    def _call_all(self, members: Members, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        return members.call(method, *args, timeout=timeout).result()

    # Memory, where others use the devices too; see `enginehouse.roles.turns`

    @property
    def serves(self) -> bool:
        """Whether a replica takes requests."""
        return any(replica.state == "serving" for replica in self._replicas)

    def sleep(self, tags: tuple[str, ...], timeout: float | None = None) -> list[int | None]:
        """Have every replica that lives free memory, whatever it is at; see `RolloutWorker.sleep`.

        Args:
            tags: what of it.
            timeout: deadline in seconds.
        """
        return self._call_living("sleep", tags, timeout=timeout)

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Have every replica that lives take memory back."""
        self._call_living("wake_up", tags)

    def profiled(self, method: str, *args: Any) -> list[Any]:
        """Have every replica that lives begin or end a profile; see `enginehouse.roles.profiles`."""
        return self._call_living(method, *args)

    def abort(self, timeout: float | None = None) -> None:
        """End all that replicas draw."""
        self._call_living("abort", timeout=timeout)

    def _call_living(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call every replica that lives; None stands for one that is lost by it. Nothing where none is left: one may be
        coming back, and who waits for it is told if none is."""
        living = self._living()
        if not living.members:
            return []
        try:
            return living.call(method, *args, timeout=timeout, leave_out_lost=True).result()
        except Exception:
            if self._living().members:
                raise
            return []

    @property
    def lives(self) -> bool:
        """Whether a replica is there, with weights or without."""
        return bool(self._living().members)

    def allow_launches(self, allowed: bool, until: float | None = None, alone: bool = False) -> None:
        """Whether replicas that are started again may start their engines, which fills their devices. Else they wait,
        and those that have begun are waited for.

        Args:
            allowed: whether they may.
            until: no longer than then, by `time.monotonic()`.
            alone: whether they may all the same where none lives, as nobody else would end the wait for one.
        """
        with self._change:
            self._launches_allowed, self._launches_alone = allowed, alone
            self._change.notify_all()
            while not allowed and self._launching and not self._closing.is_set():
                if until is not None and time.monotonic() >= until:
                    return
                self._change.wait(LOOK_SECONDS)

    @contextmanager
    def _launch_allowed(self) -> Iterator[None]:
        with self._change:
            while not (
                self._launches_allowed
                or self._closing.is_set()
                or (self._launches_alone and not self._living().members)
            ):
                self._change.wait(LOOK_SECONDS)
            self._launching += 1
        try:
            yield
        finally:
            with self._change:
                self._launching -= 1
                self._change.notify_all()

    # Drawing

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Draw a request, by the replica with the least to do, near what that saw before; again, where it is lost.

        Cancelling it ends the request. Completions hold arrays.

        Raises:
            ReplicasLost: naming each replica's death.
            PoisonousRows: it took several replicas with it.
            WorkerError: a replica that lives failed, or its engine refused the request.
        """
        ended = asyncio.Event()
        flight = self.submit(request, lambda _: ended.set())
        try:
            await ended.wait()
        finally:
            self.forget(flight)
        answer, place = flight.drawn()
        return answer.result(place, request.id)

    def submit(self, request: GenerateRequest, ended: Callable[[Flight], object]) -> Flight:
        """As `generate`, on an event loop, for who does not wait: `ended` is called with what is returned."""
        return self._routed().submit(next(self._numbers), request, ended)

    def hold(self) -> None:
        """Keep requests back until the next weight version is served (`confirmed`)."""
        self._held = True

    def forget(self, flight: Flight) -> None:
        """Nobody waits for a request any more: it ends, wherever it is."""
        if self._router is not None:
            self._router.forget(flight)

    def _routed(self) -> Router:
        """What takes requests of the running event loop to replicas."""
        loop = asyncio.get_running_loop()
        router = self._router
        if router is None or router.loop is not loop:
            if router is not None and not router.idle and not router.loop.is_closed():
                raise ControllerError(f"requests to {self.name} are under way on another event loop")
            router = self._router = Router(
                loop,
                self.name,
                self._replicas,
                limit=self._limit,
                memory=self._memory,
                metrics=lambda: self._metrics,
                watch=self._watch,
                tokens_stay=self.tokens_stay,
                held=lambda: self._held,
                forgets=not self._apart,
                is_lost=self.is_lost,
                catch_up=self._begin_to_catch_up,
            )
        return router

    def draw(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int | None = None) -> Batch:
        """Draw `sampling.n` responses to each prompt, and wait for all.

        Args:
            prompts: token ids.
            sampling: how to draw.
            seed: same seed, same weights: same responses. None draws afresh.

        Returns:
            A row a response, those of a prompt next to each other, in the prompts' order; columns as
            `enginehouse.fleet.columns.Answer.samples` has them, and `seconds`, see `generate_each`.

        Raises:
            ControllerError: as `generate`.
        """
        rows = Batch({"prompt_ids": Ragged.from_list(prompts), "prompt_index": torch.arange(len(prompts))})
        return in_order(self.generate_each(rows, sampling, seed))

    def generate_each(
        self, batch: Batch, sampling: SamplingParams, seed: int | None = None
    ) -> Iterator[tuple[Sequence[int], Batch]]:
        """Draw `sampling.n` completions of each row's prompt, for who has no event loop; see `RolloutWorker.generate`.

        Yields:
            Rows of `batch` that were drawn, and their samples: those of each row next to each other. In the order in
            which they end; all rows, each once. `seconds` is how long the replica that drew them had had anything to
            do by then, in this call.

        Raises:
            ControllerError: as `generate`.
        """
        requests = seeded_requests(batch, sampling, seed, self.name)
        before = {replica.number: self._watch.until_now(replica.number) for replica in self._replicas}
        came: queue.SimpleQueue[dict[int, Flight] | Exception] = queue.SimpleQueue()
        if not (left := len(requests)):
            return
        drawing = self._loop.submit(self._draw_all(requests, came.put))
        try:
            while left:
                if isinstance(ended := came.get(), Exception):
                    raise ended
                left -= len(ended)
                pieces: dict[int, tuple[Answer, list[int], list[int]]] = {}  # of each answer, rows and their places
                for row in sorted(ended):
                    answer, place = ended[row].drawn()
                    _, rows, places = pieces.setdefault(id(answer), (answer, [], []))
                    rows.append(row)
                    places.append(place)
                for answer, rows, places in pieces.values():
                    number = ended[rows[0]].replica
                    busy = torch.full((len(rows) * sampling.n,), self._watch.until_now(number) - before[number])
                    yield rows, answer.samples([requests[row] for row in rows], places).with_columns(seconds=busy)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._hurried = True  # whatever still runs in the replicas is of no use
            if not isinstance(error, Exception) and self._router is not None:
                self._router.hurry()
            raise
        finally:
            if left:
                drawing.cancel()

    async def _draw_all(
        self, requests: Sequence[GenerateRequest], hand_over: Callable[[dict[int, Flight] | Exception], None]
    ) -> None:
        """Draw requests, and hand those over together that end in one turn of the loop, by their places."""
        loop, flights, ended, over = asyncio.get_running_loop(), list[Flight](), dict[int, Flight](), asyncio.Event()

        def note(row: int, flight: Flight) -> None:
            if not ended:
                loop.call_soon(tell)
            ended[row] = flight

        def tell() -> None:
            hand_over(ended.copy())
            ended.clear()
            if all(flight.answer or flight.error for flight in flights):
                over.set()

        try:
            router = self._routed()
            for row, request in enumerate(requests):
                flights.append(router.submit(next(self._numbers), request, partial(note, row)))
            await over.wait()
        except Exception as error:
            hand_over(error)
        finally:
            for flight in flights:
                router.forget(flight)

    # Weights; see `enginehouse.weights.sync.Replicas`

    def members(self) -> Members:
        """Those that live, each asked just now; if there are none, the first that comes back.

        Raises:
            ReplicasLost: there are none, and none is being started again.
        """
        if self._ranks is not None:
            return self._ranks
        self._check_health()
        while not (living := self._living()).members:
            if not any(replica.comes_back for replica in self._replicas):
                raise nobody_left(self.name, self._replicas)
            with self._lock:  # a restart has deadlines
                self._change.wait(LOOK_SECONDS)
        return living

    def confirmed(self, members: Members, version: int) -> None:
        """These serve `version`, verified: those that came back take rows again."""
        self._memory.forget()
        with self._lock:
            self._version, self._held = version, False
            for member in members.members:
                replica = self._replicas[member.number]
                if replica.incarnation != member.incarnation:
                    continue
                if replica.state == "returned":
                    log.info("%s serves weight version %d and takes rows again", member.group.name, version)
                replica.state, replica.waits, replica.version = "serving", False, version
            for replica in self._replicas:  # started again while the first version was on its way to the others
                if replica.state == "serving" and replica.version != version:
                    replica.state = "returned"
        self._tell()

    def _living(self) -> Members:
        if self._ranks is not None:
            return self._ranks
        with self._lock:
            members = [replica.member for replica in self._replicas if replica.state in ("serving", "returned")]
        return Members(self.name, members, self.is_lost)

    def _begin_to_catch_up(self) -> bool:
        """Bring a replica that came back to the version served, in the background; False if there is nothing to do."""
        catch_up = self.catch_up
        ready = [replica for replica in self._replicas if replica.state == "returned" and not replica.waits]
        if self._catching_up or catch_up is None or not ready:
            return self._catching_up
        replica, member = ready[0], ready[0].member

        def bring() -> None:
            try:
                catch_up(Members(self.name, [member], self.is_lost))
            except Exception as error:
                replica.waits = True
                log.warning("%s waits for the next weight update: %s", member.group.name, error)
            finally:
                self._catching_up = False
                self._tell()

        self._catching_up = True
        threading.Thread(target=bring, name=f"{member.group.name}-weights", daemon=True).start()
        return True

    # Life and death

    def is_lost(self, member: Member, error: Exception | None) -> bool:
        """Whether a member is gone; if a call of it just showed that, it is noted and started again.

        An exception of a call is a death only if the engine then does not answer `health`.
        """
        replica = self._replicas[member.number]
        if replica.incarnation != member.incarnation:
            return True
        if error is None or not self._apart or self._closing.is_set():
            return False
        if member.group.broken is None:
            if not isinstance(error, RemoteError):
                return False
            illness = self._illness(member)
            if illness is None:
                return False
            error = illness
        self._lose(replica, member, error)
        return True

    def _illness(self, member: Member) -> Exception | None:
        """What is wrong with a replica's process or engine, if anything."""
        try:
            member.group.call("health", timeout=HEALTH_SECONDS)
        except Exception as error:
            if member.group.broken is not None or isinstance(error, RemoteError):
                return error
        return None

    def _check_health(self) -> None:
        """Ask every living replica whether it lives."""
        if not self._apart:
            return
        living = self._living()
        call = living.call("health", timeout=HEALTH_SECONDS, leave_out_lost=True)
        try:
            healths: list[Health] = [health for health in call.result() if health is not None]
        except Exception as error:  # those that died are noted; one that is merely slow is no news
            log.debug("a replica of %s did not say how it is: %s", self.name, error)
            return
        by_name = {name: [health.metrics[name] for health in healths] for name in healths[0].metrics} if healths else {}
        self._engine_metrics = {f"rollout/{name}": sum(values) / len(values) for name, values in by_name.items()}

    def _look_after(self) -> None:
        while not self._closing.wait(self._health_every):
            try:
                self._check_health()
            except Exception:  # the next look may tell more; without looks a death goes unseen
                log.exception("the health of %s could not be asked for", self.name)

    def _lose(self, replica: Replica, member: Member, error: Exception) -> None:
        with self._lock:
            if replica.incarnation != member.incarnation or self._closing.is_set():
                return
            replica.incarnation += 1
            replica.death = first_line(error)
            replica.state, replica.version = "lost", None
            for one in self._replicas:  # what another waits for may have gone with this one
                one.waits = False
            log.warning("%s is lost and is started again: %s", replica.group.name, replica.death)
            replica.restarting = threading.Thread(
                target=self._restart, args=(replica,), name=f"{replica.group.name}-restart", daemon=True
            )
            replica.restarting.start()
        self._tell()

    def _tell(self) -> None:
        """Something has happened to a replica."""
        with self._lock:
            self._change.notify_all()
        if self._router is not None:
            self._router.wake()

    def _restart(self, replica: Replica) -> None:
        """Start a replica again, as often as it may be."""
        while not self._closing.is_set():
            if replica.restarts >= self._most_restarts:
                log.error(
                    "%s is left out from now on: it was started again %d times without drawing anything in between; "
                    "at last: %s", replica.group.name, replica.restarts, replica.death,
                )  # fmt: skip
                replica.state = "out"
                self._tell()
                return
            replica.restarts += 1
            with self._lock:
                self._metrics.restarts += 1
            begun = time.perf_counter()
            try:
                replica.group.restart()
                if self._closing.is_set():
                    return
                with self._launch_allowed():
                    replica.group.call("launch", timeout=self._start_timeout)
                    with self._lock:  # within: who waits for launches to end has it sleep
                        replica.state = "returned" if self._version is not None else "serving"
            except BaseException as error:  # whatever it is, requests wait for this one
                if not self._closing.is_set():
                    replica.death = f"its restart failed: {first_line(error)}"
                    log.warning("%s: %s", replica.group.name, replica.death)
                continue
            seconds = time.perf_counter() - begun
            log.info("%s is back after %.1f s, without weights yet", replica.group.name, seconds)
            self._tell()
            return

    # Ending

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End every replica, at once; those of a group are not this one's to end. May be called again."""
        self._closing.set()
        self._loop.stop()
        if self._ranks is not None:
            return
        if self._hurried:
            timeout = min(timeout, HURRIED_SHUTDOWN_SECONDS)
        with self._lock:
            replicas = list(self._replicas)
        try:
            at_once([partial(replica.group.shutdown, timeout) for replica in replicas])
            self._wait_for_restarts(replicas, RESTART_END_SECONDS)
        finally:
            if self._pool is not None:
                self._pool.shutdown()
        self._wait_for_restarts(replicas, RESTART_END_SECONDS)  # without a place they fail

    def _wait_for_restarts(self, replicas: Sequence[Replica], seconds: float) -> None:
        """None may still call Ray when that is shut down."""
        until = time.monotonic() + seconds
        for replica in replicas:
            if (thread := replica.restarting) is not None:
                thread.join(max(until - time.monotonic(), 0.0))


def samples_in_flight(max_running: int | None) -> int:
    """Most completions a replica is given at once, whose engine generates `max_running`, if it says so: a few more, so
    that a place in the engine is taken again before the controller has heard that it is free."""
    return SAMPLES_IN_FLIGHT if max_running is None else max_running + max_running // SPARE


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Do things in threads of their own and wait for all; then raise the first error. Returns what each returned.

    Not with an executor: its threads hold up the end of the program.
    """
    if len(calls) == 1:
        return [calls[0]()]
    results: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
