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
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.controller.errors import ControllerError
from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.controller.members import GroupRanks, Members
from enginehouse.controller.supervision import RESTARTS, SHUTDOWN_SECONDS, run_at_once
from enginehouse.data import Batch, Ragged
from enginehouse.fleet.columns import Answer
from enginehouse.fleet.generation import in_order, seeded_requests
from enginehouse.fleet.replica import FLEET, FleetMetrics, Replica, ReplicaSeen, Watch
from enginehouse.fleet.replica_group import HEALTH_EVERY_SECONDS, ReplicaGroup
from enginehouse.fleet.router import Flight, Router
from enginehouse.fleet.scheduler import PrefixMemory

if TYPE_CHECKING:
    from enginehouse.engines.model import Device
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams

_STATES = {"serving": "up", "returned": "without weights", "lost": "lost", "out": "out"}
"""Of a replica, for people."""
SAMPLES_IN_FLIGHT = 512
"""Most completions a replica is given at once, where its engine does not say how many it generates (`max_running`); the
rest goes to who is free first."""
SPARE = 8
"""Where it does, it is given one more for every so many."""
ALL_IN_FLIGHT = 2**31
"""For ranks that share a fate: nothing is gained by holding back."""
HURRIED_SHUTDOWN_SECONDS = 3.0


class RolloutFleet(ReplicaGroup):
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

    Raises:
        PlacementError: the cluster does not give the places.
        WorkerError: a worker could not be built.
    """

    tokens_stay = False
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
        super().__init__(
            name, apart=launcher != "inline", restarts=restarts, start_timeout=start_timeout, health_every=health_every
        )
        self._begin_to_draw(samples_in_flight)
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
            run_at_once([partial(start, number, pool) for number, pool in enumerate(places)])
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def over(cls, group: WorkerGroup) -> RolloutFleet:
        """The ranks of a group of `RolloutWorker`s, each a replica. What ends one ends all: none is started again.

        Whoever made the group shuts it down.
        """
        fleet = cls.__new__(cls)
        ReplicaGroup.__init__(fleet, group.name, GroupRanks(group))
        fleet._begin_to_draw(ALL_IN_FLIGHT)
        return fleet

    def _begin_to_draw(self, samples_in_flight: int) -> None:
        self._limit = samples_in_flight
        self._hurried = self._held = False
        self._router: Router | None = None
        self._loop = EventLoop()
        self._memory = PrefixMemory()
        self._metrics = FleetMetrics()
        self._watch = Watch()
        self._seconds: dict[int, float] = {}  # what the watch said when metrics were last asked for

    # What it is

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
            "rollout/restarts": float(self._supervisor.take_restarts()),
            "rollout/retries": float(metrics.retries),
            "rollout/busy_seconds": busy,
            "rollout/utilisation": busy / max(seconds[FLEET], 1e-9),
            "rollout/queued": float(metrics.queued),
            **{f"rollout/{name}": value for name, value in metrics.slowest(seconds).items()},
            **self._engine_metrics,
        }

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
        try:
            await self._routed().draw_all(zip(self._numbers, requests, strict=False), hand_over)
        except Exception as error:
            hand_over(error)

    # What happens to replicas

    def confirmed(self, members: Members, version: int) -> None:
        """These serve `version`, verified: those that came back take requests again, also what was held back."""
        self._memory.forget()
        with self._lock:
            self._held = False
            super().confirmed(members, version)

    def _tell(self) -> None:
        super()._tell()
        if self._router is not None:
            self._router.wake()

    # Ending

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End every replica, at once; those of a group are not this one's to end. May be called again."""
        self._closing.set()
        self._loop.stop()
        if self._ranks is None:
            hurried = min(timeout, HURRIED_SHUTDOWN_SECONDS) if self._hurried else timeout
            self._supervisor.shutdown(hurried, self._pool)


def samples_in_flight(max_running: int | None) -> int:
    """Most completions a replica is given at once, whose engine generates `max_running`, if it says so: a few more, so
    that a place in the engine is taken again before the controller has heard that it is free."""
    return SAMPLES_IN_FLIGHT if max_running is None else max_running + max_running // SPARE
