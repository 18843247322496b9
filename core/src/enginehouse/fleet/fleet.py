"""The rollout fleet: replicas that may die one by one, or the ranks of a group, which share a fate.

Requests go to the replica with the least to do. A replica that dies, or whose engine does, loses nothing but time:
others draw its requests, it is started again in the background, and it answers again once it serves, verified, the
version that the others serve. Samples depend on seed and row alone, so they are those of an undisturbed run up to
rounding: which rows an engine computes together depends on time, and may change the last bit of a logprob, or a token.

`enginehouse.fleet.router` routes requests; `enginehouse.weights.sync` brings weights to replicas.
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
from enginehouse.fleet.balancer import PrefixMemory
from enginehouse.fleet.generation import make_seeded_requests, sort_samples
from enginehouse.fleet.replica import FLEET, BusyClock, FleetMetrics, FleetReplica, ReplicaStatus
from enginehouse.fleet.replica_group import HEALTH_EVERY_SECONDS, ReplicaGroup
from enginehouse.fleet.request_batches import AnswerBatch
from enginehouse.fleet.router import Flight, Router

if TYPE_CHECKING:
    from enginehouse.engines.model import Device
    from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams

_STATES = {"serving": "up", "returned": "without weights", "lost": "lost", "out": "out"}
"""Words for a replica's state, to be shown."""
SAMPLES_IN_FLIGHT = 512
"""Most completions a replica is given at once, if its engine does not say how many it generates (`max_running`)."""
SPARE = 8
"""If it does, the replica is given one more for each such number."""
ALL_IN_FLIGHT = 2**31
"""Limit for ranks that share a fate: nothing is gained by holding back."""
HURRIED_SHUTDOWN_SECONDS = 3.0


class RolloutFleet(ReplicaGroup):
    """Replicas of a rollout engine, each in a separate process. `launch` must come before anything else.

    Requests are awaited on one event loop; another may be used once none is in progress.

    Args:
        spec: a `RolloutWorker`, or a worker with its methods and its argument `replica`.
        name: the role's name, for messages; a replica's group is called `name-number`.
        launcher: `"ray"`, or `"inline"` with one replica, which is never restarted.
        places: a pool with a process for each replica, which this fleet shuts down; or a pool for each, which it does
            not. None: a pool without GPUs.
        timeout: seconds that a replica with requests in progress may be silent, or that any other call may take.
        start_timeout: seconds until a replica's process, and then its engine, must be there.
        seed: the run's base seed.
        threads: threads of numeric libraries in each process.
        samples_in_flight: most completions a replica is given at once.
        restarts: number of times that a replica is restarted without having generated anything; then it is left out.
        health_every: seconds between health checks of the replicas, which may take `HEALTH_SECONDS`.

    Attributes:
        tokens_stay: True if tokens stay where they are generated, and answers hold their place (`AnswerBatch.apart`).

    Raises:
        PlacementError: the cluster does not give the places.
        WorkerError: a worker could not be built.
    """

    tokens_stay = False
    _pool: ResourcePool | None = None
    _numbers = itertools.count()
    """Numbers requests of all fleets: two may share a group, whose workers know requests by their names."""

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
        self._set_up_drawing(samples_in_flight)
        if places is None:
            places = ResourcePool([replicas], timeout=start_timeout, name=name)
        if isinstance(places, ResourcePool):
            self._pool, places = places, places.split(replicas)

        def start(number: int, pool: ResourcePool) -> FleetReplica:
            options = spec.options(distributed=False)
            options.kwargs["replica"] = number
            group = WorkerGroup(
                pool, options, name=f"{name}-{number}", launcher=launcher, timeout=timeout, start_timeout=start_timeout,
                seed=seed, device=device, threads=threads,
            )  # fmt: skip
            replica = FleetReplica(number, group)
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
    def from_group(cls, group: WorkerGroup) -> RolloutFleet:
        """Make a fleet of a group of `RolloutWorker`s, each rank a replica.

        What ends one ends all, so none is started again. The caller shuts the group down.
        """
        fleet = cls.__new__(cls)
        ReplicaGroup.__init__(fleet, group.name, GroupRanks(group))
        fleet._set_up_drawing(ALL_IN_FLIGHT)
        return fleet

    def _set_up_drawing(self, samples_in_flight: int) -> None:
        self._limit = samples_in_flight
        self._hurried = self._held = False
        self._router: Router | None = None
        self._loop = EventLoop()
        self._memory = PrefixMemory()
        self._metrics = FleetMetrics()
        self._busy_clock = BusyClock()
        self._seconds: dict[int, float] = {}  # busy seconds when metrics were last asked for

    # State

    def describe_replicas(self) -> list[ReplicaStatus]:
        """Return each replica's state as this fleet knows it, without a call. From any thread."""
        router = self._router
        return [
            ReplicaStatus(
                replica.number,
                "restarting" if replica.is_started else _STATES[replica.state],
                replica.version,
                router.requests(replica.number) if router is not None else 0,
            )
            for replica in list(self._replicas)
        ]

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, all named `rollout/...`.

        `restarts` of replicas, `retries` of requests; `replicas` that serve; `busy_seconds` of a replica on average,
        and their share of the time with requests in progress (`utilisation`); `queued`, most samples that waited for a
        replica; of several replicas the `slowest_replica`, and how many times as long as others it takes (`slowest`).
        The engines' own metrics are those of the last health check.
        """
        with self._lock:
            metrics, self._metrics = self._metrics, FleetMetrics()
            numbers = (FLEET, *(replica.number for replica in self._replicas))
            before, self._seconds = self._seconds, {number: self._busy_clock.busy_seconds(number) for number in numbers}
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
        """Answer a request by a replica with little to do that saw its prompt's prefix, or by another if that one is
        lost.

        Cancelling this ends the request. Completions hold arrays.

        Raises:
            ReplicasLost: naming each replica's death.
            PoisonousRows: several replicas were lost with it.
            WorkerError: a replica that lives failed, or its engine refused the request.
        """
        ended = asyncio.Event()
        flight = self.submit(request, lambda _: ended.set())
        try:
            await ended.wait()
        finally:
            self.forget(flight)
        answer, place = flight.fetch_answer()
        return answer.result(place, request.id)

    def submit(self, request: GenerateRequest, ended: Callable[[Flight], object]) -> Flight:
        """Begin a request as `generate` does; `ended` is called with the returned flight at its end."""
        return self._router_of_loop().submit(next(self._numbers), request, ended)

    def hold(self) -> None:
        """Keep requests back until the next weight version is served (see `confirm`)."""
        self._held = True

    def forget(self, flight: Flight) -> None:
        """End a request that nobody waits for any more, wherever it is."""
        if self._router is not None:
            self._router.forget(flight)

    def _router_of_loop(self) -> Router:
        """Return the router of the running event loop."""
        loop = asyncio.get_running_loop()
        router = self._router
        if router is None or router.loop is not loop:
            if router is not None and not router.idle and not router.loop.is_closed():
                raise ControllerError(f"requests to {self.name} are in progress on another event loop")
            router = self._router = Router(
                loop,
                self.name,
                self._replicas,
                limit=self._limit,
                memory=self._memory,
                metrics=lambda: self._metrics,
                busy_clock=self._busy_clock,
                tokens_stay=self.tokens_stay,
                held=lambda: self._held,
                forgets=not self._apart,
                is_lost=self.is_lost,
                catch_up=self._begin_to_catch_up,
            )
        return router

    def draw(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seed: int | None = None) -> Batch:
        """Generate `sampling.n` responses to each prompt, and wait for all.

        Args:
            prompts: token ids.
            sampling: Sampling parameters.
            seed: Seed of the responses; equal seeds and weights give equal responses. None: a new seed each time.

        Returns:
            A row a response, those of a prompt next to each other, in the prompts' order. The columns are those of
            `enginehouse.fleet.request_batches.AnswerBatch.samples`, and `seconds`, see `generate_each`.

        Raises:
            ControllerError: see `generate`.
        """
        rows = Batch({"prompt_ids": Ragged.from_list(prompts), "prompt_index": torch.arange(len(prompts))})
        return sort_samples(self.generate_each(rows, sampling, seed))

    def generate_each(
        self, batch: Batch, sampling: SamplingParams, seed: int | None = None
    ) -> Iterator[tuple[Sequence[int], Batch]]:
        """Generate `sampling.n` completions of each row's prompt, without an event loop; see `RolloutWorker.generate`.

        Yields:
            Numbers of rows that were answered, and their samples, those of each row next to each other; in the order in
            which they end, each row once. `seconds` is how long the replica that generated them was busy in this call.

        Raises:
            ControllerError: see `generate`.
        """
        requests = make_seeded_requests(batch, sampling, seed, self.name)
        before = {replica.number: self._busy_clock.busy_seconds(replica.number) for replica in self._replicas}
        arrivals: queue.SimpleQueue[dict[int, Flight] | Exception] = queue.SimpleQueue()
        if not (unanswered := len(requests)):
            return
        drawing = self._loop.submit(self._draw_all(requests, arrivals.put))
        try:
            while unanswered:
                if isinstance(ended := arrivals.get(), Exception):
                    raise ended
                unanswered -= len(ended)
                pieces: dict[int, tuple[AnswerBatch, list[int], list[int]]] = {}  # by answer: its rows and their places
                for row in sorted(ended):
                    answer, place = ended[row].fetch_answer()
                    _, rows, places = pieces.setdefault(id(answer), (answer, [], []))
                    rows.append(row)
                    places.append(place)
                for answer, rows, places in pieces.values():
                    number = ended[rows[0]].replica
                    busy = torch.full((len(rows) * sampling.n,), self._busy_clock.busy_seconds(number) - before[number])
                    yield rows, answer.samples([requests[row] for row in rows], places).with_columns(seconds=busy)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._hurried = True  # whatever still runs in the replicas is of no use
            if not isinstance(error, Exception) and self._router is not None:
                self._router.hurry()
            raise
        finally:
            if unanswered:
                drawing.cancel()

    async def _draw_all(
        self, requests: Sequence[GenerateRequest], hand_over: Callable[[dict[int, Flight] | Exception], None]
    ) -> None:
        try:
            await self._router_of_loop().draw_all(zip(self._numbers, requests, strict=False), hand_over)
        except Exception as error:
            hand_over(error)

    # Life of replicas

    def confirm(self, members: Members, version: int) -> None:
        """Give requests, held back ones too, to `members`, which were verified to serve `version`."""
        self._memory.forget()
        with self._lock:
            self._held = False
            super().confirm(members, version)

    def _notify(self) -> None:
        super()._notify()
        if self._router is not None:
            self._router.wake()

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End all replicas at the same time, but not the ranks of a group. May be called again."""
        self._closing.set()
        self._loop.stop()
        if self._ranks is None:
            hurried = min(timeout, HURRIED_SHUTDOWN_SECONDS) if self._hurried else timeout
            self._supervisor.shutdown(hurried, self._pool)


def samples_in_flight(max_running: int | None) -> int:
    """Return the most completions to give a replica at once, whose engine generates `max_running` if it says so.

    They are a few more than that: a place in the engine is taken again before the controller hears that it is free.
    """
    return SAMPLES_IN_FLIGHT if max_running is None else max_running + max_running // SPARE
