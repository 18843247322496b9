"""Requests on their way through a fleet, on one event loop: each to a replica, and again where that is lost.

Which replica that is, is `enginehouse.fleet.scheduler`; who lives, and comes back, is `enginehouse.fleet.fleet`.
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
from enginehouse.fleet.columns import Answer, Requests
from enginehouse.fleet.replica import FLEET, Replica, Watch, nobody_left
from enginehouse.fleet.scheduler import Attempt, Entry, PrefixMemory, Scheduler, prefixes

if TYPE_CHECKING:
    from enginehouse.controller import DistributedBatch
    from enginehouse.engines.rollout import GenerateRequest
    from enginehouse.fleet.replica import FleetMetrics

MOST_TRIES = 3
"""A request that was lost with so many replicas is taken for their cause."""
MOST_NAMED = 8
"""How many requests an error names."""


class PoisonousRows(ControllerError):
    """Requests that were lost with every replica that tried to draw them."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way.

    Attributes:
        number: which it is.
        request: as it was asked for.
        ended: called with this once it has ended, unless nobody waits for it any more (`Router.forget`).
        answer: what it came in, and its place there, once it is drawn.
        replica: who drew it.
        error: what went wrong.
    """

    number: int
    request: GenerateRequest
    ended: Callable[[Flight], object]
    answer: tuple[Answer, int] | None = None
    replica: int = -1
    error: Exception | None = None

    def drawn(self) -> tuple[Answer, int]:
        """Its answer, once it has ended; raises its error."""
        if self.answer is None:
            assert self.error is not None
            raise self.error
        answer, place = self.answer
        return (answer if answer.apart is None else answer.joined(answer.apart.fetch())), place


class Router:
    """Takes requests to replicas. Everything here runs on one event loop, but for `wake` and `hurry`.

    Args:
        loop: that loop.
        name: the fleet's, for messages.
        replicas: the fleet's.
        limit: most completions a replica is given at once.
        memory: which of them saw which prefix.
        metrics: gives where what happens is counted.
        watch: told who has something to do.
        apart: whether tokens stay where they are drawn (`Answer.apart`).
        held: whether requests are kept back; who ends that has this woken.
        forgets: whether prefixes are forgotten once nothing is under way, so that who draws what does not depend on
            what was drawn before.
        is_lost: the fleet's; it may take long.
        catch_up: begins to bring a replica that came back to the version served, and has this woken in the end; False
            if there is nothing to do.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        replicas: Sequence[Replica],
        *,
        limit: int,
        memory: PrefixMemory,
        metrics: Callable[[], FleetMetrics],
        watch: Watch,
        tokens_stay: bool,
        held: Callable[[], bool],
        forgets: bool,
        is_lost: Callable[[Member, Exception | None], bool],
        catch_up: Callable[[], bool],
    ):
        self.loop = loop
        self._name, self._replicas = name, replicas
        self._memory, self._metrics, self._watch = memory, metrics, watch
        self._method = "draw_apart" if tokens_stay else "draw"
        self._held_back = held
        self._forgets, self._is_lost, self._catch_up = forgets, is_lost, catch_up
        self._scheduler = Scheduler(limit, memory)
        self._flights: dict[int, Flight] = {}
        self._serving: dict[int, Member] = {}
        self._held: dict[int, dict[str, tuple[Attempt, float]]] = {}  # by replica and name, and since when
        self._aborted: dict[int, list[str]] = {}  # by replica, to be told to it
        self._exchange = Exchange[Member](self._turn, self._take, self._failed)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return self._scheduler.done

    def submit(self, number: int, request: GenerateRequest, ended: Callable[[Flight], object]) -> Flight:
        """Have a request drawn; those of one turn of the loop go to a replica as one call, in their order.

        Its `error` may be:
            ReplicasLost: naming each replica's death.
            PoisonousRows: it took several replicas with it.
            WorkerError: a replica that lives failed, or the engine refused it.

        Args:
            number: larger than that of any request before.
            request: what to draw.
            ended: called with what is returned, once it has ended.
        """
        if self._forgets and self._scheduler.done:
            self._memory.forget()
        flight = self._flights[number] = Flight(number, request, ended)
        seen = prefixes(np.asarray(request.prompt_ids, np.int64)) if len(self._replicas) > 1 else ()
        self._scheduler.add(Entry(number, request.sampling.n, seen))
        self._exchange.soon()
        return flight

    async def draw_all(
        self, requests: Iterable[tuple[int, GenerateRequest]], hand_over: Callable[[dict[int, Flight]], None]
    ) -> None:
        """Have numbered requests drawn, and hand those over together that end in one turn of the loop, by their places.

        Cancelling this ends the requests.
        """
        flights, ended, over = list[Flight](), dict[int, Flight](), asyncio.Event()

        def note(place: int, flight: Flight) -> None:
            if not ended:
                self.loop.call_soon(tell)
            ended[place] = flight

        def tell() -> None:
            hand_over(ended.copy())
            ended.clear()
            if all(flight.answer or flight.error for flight in flights):
                over.set()

        try:
            for place, (number, request) in enumerate(requests):
                flights.append(self.submit(number, request, partial(note, place)))
            await over.wait()
        finally:
            for flight in flights:
                self.forget(flight)

    def forget(self, flight: Flight) -> None:
        """Nobody waits for a request any more: it ends, wherever it is."""
        if self._flights.pop(flight.number, None) is None:
            return
        if (attempt := self._scheduler.drop(flight.number)) is not None:
            self._aborted.setdefault(attempt.replica, []).append(self._named(flight.number))
        self._exchange.soon()

    def _named(self, number: int) -> str:
        """What replicas call a request: a caller's ids may be those of another caller too."""
        return f"{self._name}-{number}"

    def wake(self) -> None:
        """Something has happened to a replica. From any thread."""
        with suppress(RuntimeError):  # the loop was closed: there is nothing to be done any more
            self.loop.call_soon_threadsafe(self._exchange.soon)

    def hurry(self) -> None:
        """Who waited was interrupted. From any thread."""
        self._exchange.hurry()

    def requests(self, replica: int) -> int:
        """How many requests a replica was given and has not answered. From any thread."""
        return len(self._held.get(replica, ()))

    # What is done in one turn of the loop

    def _turn(self) -> None:
        self._follow()
        given: dict[int, list[Attempt]] = {}
        for attempt in () if self._held_back() else self._scheduler.assign():
            given.setdefault(attempt.replica, []).append(attempt)
        for number in self._scheduler.replicas:
            attempts, aborted, member = given.get(number, ()), self._aborted.pop(number, ()), self._serving[number]
            if attempts or aborted or (self._scheduler.load(number) and not self._exchange.has_call(member)):
                self._draw(member, attempts, aborted)
        self._note()
        nobody = self._scheduler.waiting and not self._catch_up() and not self._serving
        if nobody and not any(replica.is_started for replica in self._replicas):
            self._fail(list(self._flights), nobody_left(self._name, self._replicas))

    def _follow(self) -> None:
        """Give nothing more to replicas that were lost, and something to those that serve again."""
        for replica in self._replicas:
            member = replica.member if replica.state == "serving" else None
            known = self._serving.get(replica.number)
            if known == member:
                continue
            if known is not None:
                self._leave(replica.number)
            if member is not None:
                self._serving[replica.number], self._held[replica.number] = member, {}
                self._scheduler.join(replica.number)

    def _leave(self, replica: int) -> None:
        del self._serving[replica], self._held[replica]
        self._aborted.pop(replica, None)
        lost = self._scheduler.leave(replica)
        self._metrics().retries += len(lost)
        poisonous = [entry.number for entry in lost if self._scheduler.tries(entry.number) >= MOST_TRIES]
        if poisonous:
            named = [repr(self._flights[number].request.id) for number in poisonous if number in self._flights]
            more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
            deaths = "\n".join(f"- {replica.death}" for replica in self._replicas if replica.death)
            what = f"{', '.join(named[:MOST_NAMED])}{more}"
            self._fail(poisonous, PoisonousRows(
                f"requests {what} were lost with the replica that was to draw them {MOST_TRIES} times; if they are "
                f"what it dies of, another replica will as well. The last deaths:\n{deaths}"
            ))  # fmt: skip
        for entry in lost:
            if entry.number not in self._flights:  # nobody wants it any more
                self._scheduler.drop(entry.number)

    def _note(self) -> None:
        scheduler = self._scheduler
        busy = {number for number in scheduler.replicas if scheduler.load(number)}
        self._watch.set_busy(busy if scheduler.done or self._held_back() else busy | {FLEET})
        metrics = self._metrics()
        metrics.queued = max(metrics.queued, scheduler.waiting_samples)

    def _draw(self, member: Member, attempts: Sequence[Attempt], aborted: Sequence[str]) -> None:
        numbers = [attempt.entry.number for attempt in attempts]
        names = list(map(self._named, numbers))
        now = time.perf_counter()
        self._held[member.number].update({name: (one, now) for name, one in zip(names, attempts, strict=True)})
        requests = Requests.pack([self._flights[number].request for number in numbers], names)
        rank = self._replicas[member.number].rank
        self._exchange.send(
            member, lambda: member.group.execute_rank_async(rank, self._method, requests, tuple(aborted))
        )

    # What comes back

    async def _take(self, member: Member, answer: Answer | tuple[Answer, DistributedBatch]) -> None:
        if isinstance(answer, tuple):
            answer = replace(answer[0], apart=answer[1])
        if self._serving.get(member.number) == member:  # else they are drawn by another
            self._hand_over(member, answer)
            await self._refused(member, answer)

    def _hand_over(self, member: Member, answer: Answer) -> None:
        """Hand over what was drawn; it counts, whatever becomes of the replica that drew it."""
        lengths, now = np.diff(answer.offsets), time.perf_counter()
        for place, name in enumerate(answer.ids):
            of_request = lengths[answer.firsts[place] : answer.firsts[place + 1]]
            finished = self._finished(member, name)
            self._replicas[member.number].restarts = 0
            if finished is None:
                continue
            (number, begun), drawn = finished, self._metrics().drawn
            drawn[member.number].count(int(of_request.sum()), int(of_request.max(initial=0)), now - begun)
            if (flight := self._flights.pop(number, None)) is not None:
                flight.answer, flight.replica = (answer, place), member.number
                flight.ended(flight)
        self._note()

    def _finished(self, member: Member, name: str) -> tuple[int, float] | None:
        """The number of a request that a replica answered, and when it was given to it; None: it does not hold it."""
        attempt, begun = self._held[member.number].pop(name, (None, 0.0))
        return (attempt.entry.number, begun) if attempt is not None and self._scheduler.finish(attempt) else None

    async def _refused(self, member: Member, answer: Answer) -> None:
        """Requests failed one by one: of what their engine died of, or of themselves."""
        errors = {name: failure.to_error() for name, failure in answer.failures.items()}
        if not errors or await self._lost(member, next(iter(errors.values()))):
            return
        for name, error in errors.items():
            if (finished := self._finished(member, name)) is not None:
                self._end(finished[0], error)
        self._note()

    async def _failed(self, member: Member, error: Exception) -> None:
        """A call failed: of a replica that is lost then, else for all that it was given."""
        if isinstance(error, ClusterLost):
            self._fail(list(self._flights), error)
        elif not await self._lost(member, error):
            self._fail([attempt.entry.number for attempt in self._scheduler.held(member.number)], error)

    async def _lost(self, member: Member, error: Exception) -> bool:
        lost = await self.loop.run_in_executor(None, self._is_lost, member, error)
        if lost and self._serving.get(member.number) == member:
            self._leave(member.number)
        return lost

    # Ends

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        for number in numbers:
            if (attempt := self._scheduler.drop(number)) is not None:
                self._scheduler.finish(attempt)
            self._end(number, error)
        self._note()

    def _end(self, number: int, error: Exception) -> None:
        if (flight := self._flights.pop(number, None)) is not None:  # else nobody waits for it
            flight.error = error
            flight.ended(flight)
