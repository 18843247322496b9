"""The rollout fleet: replicas that may die separately, or the ranks of a group, which end together.

Requests go to the replica with the least load. If a replica or its engine dies, other replicas generate its responses.
The fleet restarts the replica in the background, and uses it again once it serves the other replicas' version,
verified. Samples depend only on seed and row, so they equal the samples of an undisturbed run up to rounding. Which
rows an engine computes together depends on time, and may change the last bit of a logprob, or a token.

`enginehouse.fleet.router` routes requests, and `enginehouse.weights.sync` sends weights to replicas.
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
SAMPLES_IN_FLIGHT = 512
"""Maximum number of completions of a replica at once, if its engine does not report `max_running`."""
SPARE = 8
"""Divisor: a replica whose engine reports `max_running` gets `max_running // SPARE` additional completions."""
ALL_IN_FLIGHT = 2**31
"""Limit for replicas that are the ranks of a group: practically none. All ranks end together, so no other rank could
take a request that was held back."""
HURRIED_SHUTDOWN_SECONDS = 3.0


class RolloutFleet(ReplicaGroup):
    """Replicas of a rollout engine, each in a separate process. Call `launch` before anything else.

    Requests are awaited on one event loop. Another loop may be used once no request is in progress.

    Args:
        spec: `RolloutWorker`, or a worker class with the methods and the argument `replica` of `RolloutWorker`.
        name: name of the role, for messages. The group of a replica is called `name-number`.
        launcher: `"ray"`, or `"inline"` with one replica, which is never restarted.
        places: a pool with a process for each replica, which this fleet shuts down, or a pool for each replica, which
            it does not shut down. None: a pool without GPUs.
        timeout: seconds that a replica with requests in progress may be silent, or that any other call may take.
        start_timeout: seconds within which a replica's process, and then its engine, must start.
        seed: base seed of the run.
        threads: number of threads that numeric libraries use in each process.
        samples_in_flight: maximum number of completions of a replica at once.
        restarts: maximum number of restarts of a replica without a completion in between, after which it is left out.
        health_every: seconds between health checks of the replicas, which may take `HEALTH_SECONDS`.

    Attributes:
        tokens_stay: True if tokens stay on the worker that generates them, and answers only refer to them
            (`AnswerBatch.apart`).

    Raises:
        PlacementError: the cluster does not provide the places.
        WorkerError: a worker could not be built.
    """

    tokens_stay = False
    _pool: ResourcePool | None = None
    _numbers = itertools.count()
    """Numbers the requests of all fleets, because fleets may share a group that identifies requests by number."""

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
        """Make a fleet of a group of `RolloutWorker`s, in which each rank is a replica. All ranks end together, so none
        is restarted. The caller shuts the group down."""
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
        self._seconds: dict[int, float] = {}  # busy seconds at the last call of `metrics`

    def describe_replicas(self) -> list[ReplicaStatus]:
        """Return the state of each replica as this fleet knows it, without a call. Callable from any thread."""
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

        They are `restarts` of replicas, `retries` of requests, the number of serving `replicas`, and `queued`, the
        maximum number of samples that waited for a replica. `busy_seconds` is the mean time in which a replica had
        requests. `utilisation` is `busy_seconds` divided by the time in which any replica had requests. With several
        replicas the metrics include the number of the slowest replica (`slowest_replica`), and the factor by which it
        takes longer than the others (`slowest`). The engines' own metrics are those of the last health check.
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

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on a replica with a low load that has the prompt's prefix, or on another replica if that replica is
        lost.

        Cancelling this coroutine ends the request. Completions hold arrays.

        Raises:
            ReplicasLost: all replicas are lost; the message states the cause of each replica's death.
            PoisonousRows: several replicas were lost with this request.
            WorkerError: a living replica failed, or its engine rejected the request.
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
        """Begin a request as `generate` does. At its end, `ended` is called with the returned flight."""
        return self._router_of_loop().submit(next(self._numbers), request, ended)

    def hold(self) -> None:
        """Hold requests back until the next weight version is served (see `confirm`)."""
        self._held = True

    def forget(self, flight: Flight) -> None:
        """End a request whose result nobody needs any more."""
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
            seed: seed of the responses. Equal seeds and weights give equal responses. None: a new seed each time.

        Returns:
            One row per response, in the order of the prompts. It has the columns of
            `enginehouse.fleet.request_batches.AnswerBatch.samples`, and the column `seconds` of `generate_each`.

        Raises:
            ControllerError: the errors of `generate`.
        """
        rows = Batch({"prompt_ids": Ragged.from_list(prompts), "prompt_index": torch.arange(len(prompts))})
        return sort_samples(self.generate_each(rows, sampling, seed))

    def generate_each(
        self, batch: Batch, sampling: SamplingParams, seed: int | None = None
    ) -> Iterator[tuple[Sequence[int], Batch]]:
        """Generate `sampling.n` completions of each row's prompt, without an event loop; see `RolloutWorker.generate`.

        Yields:
            Indices of the rows of `batch` that have ended, and the samples of these rows. The samples of a row are next
            to each other. Each row is yielded once, when its last sample has ended. The column `seconds` is the time
            for which the replica that generated a sample had been busy since this call began.

        Raises:
            ControllerError: the errors of `generate`.
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
                pieces: dict[int, tuple[AnswerBatch, list[int], list[int]]] = {}  # rows and their places, by answer
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
            self._hurried = True  # nobody needs the requests that still run
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

    def confirm(self, members: Members, version: int) -> None:
        """Give requests, also those held back, to `members`, which were verified to serve `version`."""
        self._memory.forget()
        with self._lock:
            self._held = False
            super().confirm(members, version)

    def _notify(self) -> None:
        super()._notify()
        if self._router is not None:
            self._router.wake()

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End all replicas at the same time, but not the ranks of a group. A second call does nothing."""
        self._closing.set()
        self._loop.stop()
        if self._ranks is None:
            hurried = min(timeout, HURRIED_SHUTDOWN_SECONDS) if self._hurried else timeout
            self._supervisor.shutdown(hurried, self._pool)


def samples_in_flight(max_running: int | None) -> int:
    """Return the maximum number of completions of a replica at once.

    `max_running` is the maximum that its engine reports, or None. The number is a little larger than `max_running`, so
    that the engine has a next request before the controller hears that a request has ended.
    """
    return SAMPLES_IN_FLIGHT if max_running is None else max_running + max_running // SPARE
