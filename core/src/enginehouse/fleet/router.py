"""Routes a fleet's requests to replicas, on one event loop, and routes them again if their replica is lost.

`enginehouse.fleet.balancer` chooses the replica, and `enginehouse.fleet.fleet` knows which replicas live.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from enginehouse.controller.errors import ClusterLost, ControllerError
from enginehouse.controller.exchange import Exchange
from enginehouse.controller.members import Member
from enginehouse.fleet.balancer import Attempt, Entry, PrefixMemory, ReplicaBalancer, hash_prefixes
from enginehouse.fleet.replica import FLEET, BusyClock, FleetReplica, make_replicas_lost
from enginehouse.fleet.request_batches import AnswerBatch, RequestBatch

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.rollout import GenerateRequest
    from enginehouse.fleet.replica import FleetMetrics

MOST_TRIES = 3
"""Number of lost replicas after which their common request counts as the cause."""
MOST_NAMED = 8


class PoisonousRows(ControllerError):
    """Every replica that tried to answer these requests was lost, so the requests are probably the cause."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request in progress.

    Attributes:
        ended: called with this flight once it has ended, unless it was forgotten (`Router.forget`).
        answer: the answer batch and the request's place in it; None before the answer.
    """

    number: int
    request: GenerateRequest
    ended: Callable[[Flight], object]
    answer: tuple[AnswerBatch, int] | None = None
    replica: int = -1
    error: Exception | None = None

    def fetch_answer(self) -> tuple[AnswerBatch, int]:
        """Return the answer of an ended flight, or raise its error."""
        if self.answer is None:
            assert self.error is not None
            raise self.error
        answer, place = self.answer
        return (answer if answer.apart is None else answer.join(answer.apart.fetch())), place


class Router:
    """Sends requests to replicas. All methods but `wake`, `hurry` and `requests` run on one event loop.

    Args:
        limit: maximum number of completions of a replica at once.
        tokens_stay: True if tokens stay on the worker that generates them (`AnswerBatch.apart`).
        held: returns True while requests are held back. The code that ends this state calls `wake`.
        forgets: True if prefixes are forgotten once no request is in progress, so that the choice of a replica does not
            depend on earlier requests.
        is_lost: `is_lost` of the fleet, which may take long.
        catch_up: begins to send the served version to a returned replica, and calls `wake` at the end. Returns False if
            there is no such replica.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        replicas: Sequence[FleetReplica],
        *,
        limit: int,
        memory: PrefixMemory,
        metrics: Callable[[], FleetMetrics],
        busy_clock: BusyClock,
        tokens_stay: bool,
        held: Callable[[], bool],
        forgets: bool,
        is_lost: Callable[[Member, Exception | None], bool],
        catch_up: Callable[[], bool],
    ):
        self.loop = loop
        self._name, self._replicas = name, replicas
        self._memory, self._metrics, self._busy_clock = memory, metrics, busy_clock
        self._method = "draw_apart" if tokens_stay else "draw"
        self._held_back = held
        self._forgets, self._is_lost, self._catch_up = forgets, is_lost, catch_up
        self._balancer = ReplicaBalancer(limit, memory)
        self._flights: dict[int, Flight] = {}
        self._serving: dict[int, Member] = {}
        self._attempts: dict[int, dict[str, tuple[Attempt, float]]] = {}  # by replica and name, with the start time
        self._aborted: dict[int, list[str]] = {}  # by replica, to send with the next call
        self._exchange = Exchange[Member](self._turn, self._take, self._take_error)

    @property
    def idle(self) -> bool:
        return self._balancer.done

    def submit(self, number: int, request: GenerateRequest, ended: Callable[[Flight], object]) -> Flight:
        """Begin a request. The requests of one turn of the loop go to a replica in one call, in their order.

        The flight's `error` may be `ReplicasLost` (all replicas died), `PoisonousRows` (several replicas were lost with
        the request), or `WorkerError` (a living replica failed, or its engine rejected the request).

        Args:
            number: number of the request, larger than the numbers of all earlier requests.
            ended: called with the returned flight once it has ended.
        """
        if self._forgets and self._balancer.done:
            self._memory.forget()
        flight = self._flights[number] = Flight(number, request, ended)
        prefixes = hash_prefixes(np.asarray(request.prompt_ids, np.int64)) if len(self._replicas) > 1 else ()
        self._balancer.add(Entry(number, request.sampling.n, prefixes))
        self._exchange.soon()
        return flight

    async def draw_all(
        self, requests: Iterable[tuple[int, GenerateRequest]], hand_over: Callable[[dict[int, Flight]], None]
    ) -> None:
        """Answer `requests`: pairs of a number (see `submit`) and a request.

        `hand_over` gets the flights that end in one turn of the loop, by the index of their pair in `requests`.
        Cancelling this coroutine ends the requests.
        """
        flights, ended, all_ended = list[Flight](), dict[int, Flight](), asyncio.Event()

        def note(place: int, flight: Flight) -> None:
            if not ended:
                self.loop.call_soon(flush)
            ended[place] = flight

        def flush() -> None:
            hand_over(ended.copy())
            ended.clear()
            if all(flight.answer or flight.error for flight in flights):
                all_ended.set()

        try:
            for place, (number, request) in enumerate(requests):
                flights.append(self.submit(number, request, partial(note, place)))
            await all_ended.wait()
        finally:
            for flight in flights:
                self.forget(flight)

    def forget(self, flight: Flight) -> None:
        """End a request whose result nobody needs any more."""
        if self._flights.pop(flight.number, None) is None:
            return
        if (attempt := self._balancer.drop(flight.number)) is not None:
            self._aborted.setdefault(attempt.replica, []).append(self._replica_name(flight.number))
        self._exchange.soon()

    def _replica_name(self, number: int) -> str:
        """Return a request's name at replicas. Its id is not unique, because several callers may use the same ids."""
        return f"{self._name}-{number}"

    def wake(self) -> None:
        """Check the replicas again, because the state of a replica has changed. Callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._exchange.soon)

    def hurry(self) -> None:
        """Shorten waits, because the caller was interrupted. Callable from any thread."""
        self._exchange.hurry()

    def requests(self, replica: int) -> int:
        """Return the number of requests in progress at a replica. Callable from any thread."""
        return len(self._attempts.get(replica, ()))

    def _turn(self) -> None:
        self._follow_states()
        assigned: dict[int, list[Attempt]] = {}
        for attempt in () if self._held_back() else self._balancer.assign():
            assigned.setdefault(attempt.replica, []).append(attempt)
        for number in self._balancer.replicas:
            attempts, aborted, member = assigned.get(number, ()), self._aborted.pop(number, ()), self._serving[number]
            if attempts or aborted or (self._balancer.load(number) and not self._exchange.has_call(member)):
                self._draw(member, attempts, aborted)
        self._note()
        nobody = self._balancer.waiting and not self._catch_up() and not self._serving
        if nobody and not any(replica.is_started for replica in self._replicas):
            self._fail(list(self._flights), make_replicas_lost(self._name, self._replicas))

    def _follow_states(self) -> None:
        """Remove lost replicas, and let replicas that serve again take requests."""
        for replica in self._replicas:
            member = replica.member if replica.state == "serving" else None
            current = self._serving.get(replica.number)
            if current == member:
                continue
            if current is not None:
                self._leave(replica.number)
            if member is not None:
                self._serving[replica.number], self._attempts[replica.number] = member, {}
                self._balancer.join(replica.number)

    def _leave(self, replica: int) -> None:
        del self._serving[replica], self._attempts[replica]
        self._aborted.pop(replica, None)
        lost = self._balancer.leave(replica)
        self._metrics().retries += len(lost)
        poisonous = [entry.number for entry in lost if self._balancer.tries(entry.number) >= MOST_TRIES]
        if poisonous:
            names = [repr(self._flights[number].request.id) for number in poisonous if number in self._flights]
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            deaths = "\n".join(f"- {replica.death}" for replica in self._replicas if replica.death)
            what = f"{', '.join(names[:MOST_NAMED])}{more}"
            self._fail(poisonous, PoisonousRows(
                f"requests {what} were lost {MOST_TRIES} times, each time with their replica. They are not sent to "
                f"another replica, because they may kill it too. The last deaths:\n{deaths}"
            ))  # fmt: skip
        for entry in lost:
            if entry.number not in self._flights:  # forgotten
                self._balancer.drop(entry.number)

    def _note(self) -> None:
        balancer = self._balancer
        busy = {number for number in balancer.replicas if balancer.load(number)}
        self._busy_clock.set_busy(busy if balancer.done or self._held_back() else busy | {FLEET})
        metrics = self._metrics()
        metrics.queued = max(metrics.queued, balancer.waiting_samples)

    def _draw(self, member: Member, attempts: Sequence[Attempt], aborted: Sequence[str]) -> None:
        numbers = [attempt.entry.number for attempt in attempts]
        names = list(map(self._replica_name, numbers))
        now = time.perf_counter()
        self._attempts[member.number] |= {name: (attempt, now) for name, attempt in zip(names, attempts, strict=True)}
        requests = RequestBatch.pack([self._flights[number].request for number in numbers], names)
        rank = self._replicas[member.number].rank
        self._exchange.send(
            member, lambda: member.group.execute_rank_async(rank, self._method, requests, tuple(aborted))
        )

    async def _take(self, member: Member, answer: AnswerBatch | tuple[AnswerBatch, DistributedBatch]) -> None:
        if isinstance(answer, tuple):
            answer = replace(answer[0], apart=answer[1])
        if self._serving.get(member.number) == member:  # else another replica answers the requests
            self._hand_over(member, answer)
            await self._take_failures(member, answer)

    def _hand_over(self, member: Member, answer: AnswerBatch) -> None:
        """Hand over answered requests. The answers count even if their replica is lost afterwards."""
        lengths, now = np.diff(answer.offsets), time.perf_counter()
        for place, name in enumerate(answer.ids):
            request_lengths = lengths[answer.firsts[place] : answer.firsts[place + 1]]
            finished = self._finish(member, name)
            self._replicas[member.number].restarts = 0
            if finished is None:
                continue
            (number, begun), drawn = finished, self._metrics().drawn
            drawn[member.number].count(int(request_lengths.sum()), int(request_lengths.max(initial=0)), now - begun)
            if (flight := self._flights.pop(number, None)) is not None:
                flight.answer, flight.replica = (answer, place), member.number
                flight.ended(flight)
        self._note()

    def _finish(self, member: Member, name: str) -> tuple[int, float] | None:
        """Return an answered request's number and start time; None if the replica does not have it."""
        attempt, begun = self._attempts[member.number].pop(name, (None, 0.0))
        return (attempt.entry.number, begun) if attempt is not None and self._balancer.finish(attempt) else None

    async def _take_failures(self, member: Member, answer: AnswerBatch) -> None:
        """End requests that failed. If their replica is lost, they are not ended, but sent to another replica."""
        errors = {name: failure.to_error() for name, failure in answer.failures.items()}
        if not errors or await self._check_lost(member, next(iter(errors.values()))):
            return
        for name, error in errors.items():
            if (finished := self._finish(member, name)) is not None:
                self._end(finished[0], error)
        self._note()

    async def _take_error(self, member: Member, error: Exception) -> None:
        """Handle a failed call. Either its replica is lost, or all requests of the replica fail."""
        if isinstance(error, ClusterLost):
            self._fail(list(self._flights), error)
        elif not await self._check_lost(member, error):
            self._fail([attempt.entry.number for attempt in self._balancer.list_attempts(member.number)], error)

    async def _check_lost(self, member: Member, error: Exception) -> bool:
        lost = await self.loop.run_in_executor(None, self._is_lost, member, error)
        if lost and self._serving.get(member.number) == member:
            self._leave(member.number)
        return lost

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        for number in numbers:
            if (attempt := self._balancer.drop(number)) is not None:
                self._balancer.finish(attempt)
            self._end(number, error)
        self._note()

    def _end(self, number: int, error: Exception) -> None:
        if (flight := self._flights.pop(number, None)) is not None:  # else it was forgotten
            flight.error = error
            flight.ended(flight)
