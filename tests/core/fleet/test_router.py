"""Requests on their way to replicas that answer, fall ill and die as a test says. No processes, no engines."""

import asyncio
import itertools
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller import exchange
from enginehouse.controller.errors import ClusterLost, RemoteError, WorkerDied
from enginehouse.controller.exchange import AnswerQueue
from enginehouse.controller.launchers.failure import CallSite, WorkerFailure
from enginehouse.engines.rollout import Completion, GenerateRequest, GenerateResult, SamplingParams
from enginehouse.fleet.balancer import PrefixMemory
from enginehouse.fleet.replica import BusyClock, FleetMetrics, FleetReplica, ReplicaCounts, ReplicasLost
from enginehouse.fleet.request_batches import AnswerBatch
from enginehouse.fleet.router import MOST_TRIES, PoisonousRows, Router


class FakeGroup:
    """One replica, which has what it was asked for in `asked`, and says nothing by itself."""

    def __init__(self, number):
        self.name = f"rollout-{number}"
        self.asked, self.aborted, self.calls = [], [], []

    def execute_rank_async(self, rank, method, requests, aborted):
        assert (rank, method) == (0, "draw")
        self.asked += [request.id for request in requests.unpack()]
        self.aborted += aborted
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    @property
    def out(self):
        return [call for call in self.calls if not call.done()]

    def answer(self, *names, **failures):
        drawn = [GenerateResult(name, (Completion([7], [-1.0], "stop", 1, 1),)) for name in names]
        failed = {name: WorkerFailure.pack(error, CallSite(self.name, 0, "here", 1, "generate")) for name, error in
                  {name.replace("_", "-"): error for name, error in failures.items()}.items()}  # fmt: skip
        self.out[0].set_result(AnswerBatch.pack(drawn, failed))

    def die(self):
        self.out[0].set_exception(WorkerDied(f"{self.name} died"))


class Asked:
    """A request whose `result` is awaited."""

    def __init__(self, router, number, name, token):
        self.result = asyncio.get_running_loop().create_future()
        self.flight = router.submit(number, GenerateRequest(name, [token], SamplingParams()), self.ended)
        self.forget = lambda: router.forget(self.flight)

    def ended(self, flight):
        if flight.error is not None:
            self.result.set_exception(flight.error)
        else:
            answer, place = flight.answer
            self.result.set_result(answer.result(place, flight.request.id))


class House:
    """Two replicas; one that dies stays gone, unless a test brings it back."""

    def __init__(self, replicas=2, limit=4, kind=FakeGroup):
        self.groups = [kind(number) for number in range(replicas)]
        self.replicas = [FleetReplica(number, group) for number, group in enumerate(self.groups)]
        self.held = False
        self.metrics, self.ill, self.numbers = FleetMetrics(), set(), itertools.count()
        self.router = Router(
            asyncio.get_running_loop(), "fleet", self.replicas, limit=limit, memory=PrefixMemory(),
            metrics=lambda: self.metrics, busy_clock=BusyClock(), tokens_stay=False, held=lambda: self.held,
            forgets=False, is_lost=self.is_lost, catch_up=lambda: False,
        )  # fmt: skip

    def is_lost(self, member, error):
        replica = self.replicas[member.number]
        if replica.incarnation != member.incarnation:
            return True
        if error is None or not (isinstance(error, WorkerDied) or member.number in self.ill):
            return False
        replica.incarnation, replica.state, replica.death = replica.incarnation + 1, "lost", str(error)
        return True

    def bring_back(self, number):
        self.ill.discard(number)
        self.replicas[number].state = "serving"
        self.router.wake()

    def submit(self, count=1):
        return [Asked(self.router, next(self.numbers), f"mine-{number}", 3 + number) for number in range(count)]

    async def until(self, holds):
        async with asyncio.timeout(10.0):
            while not holds():
                await asyncio.sleep(0)


def with_house(**options):
    """Run a test on an event loop, with a house."""

    def decorate(test):
        def run():
            async def main():
                await test(House(**options))

            asyncio.run(main())

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


@with_house(replicas=1)
async def test_one_call_hands_over_what_came_in_a_turn_and_one_collects(house):
    (group,) = house.groups
    flights = house.submit(3)
    await house.until(lambda: group.calls)
    assert group.asked == ["fleet-0", "fleet-1", "fleet-2"]
    group.answer("fleet-1")
    await house.until(lambda: len(group.calls) == 2)
    assert [flight.result.done() for flight in flights] == [False, True, False]
    assert flights[1].result.result().id == "mine-1"
    assert group.asked[3:] == []
    group.answer("fleet-2", "fleet-0")
    await house.until(lambda: house.router.idle and not group.out)
    assert len(group.calls) == 2


@with_house(replicas=1)
async def test_requests_that_are_held_back_go_out_together_once_they_are_not(house):
    (group,) = house.groups
    house.held = True
    flights = house.submit(2)
    await house.until(lambda: not house.router._exchange.scheduled)
    flights += house.submit(1)
    await house.until(lambda: not house.router._exchange.scheduled)
    assert group.calls == []
    house.held = False
    house.router.wake()
    await house.until(lambda: group.calls)
    assert group.asked == ["fleet-0", "fleet-1", "fleet-2"]
    group.answer(*group.asked)
    await asyncio.gather(*(flight.result for flight in flights))


@with_house()
async def test_what_a_lost_replica_had_is_drawn_by_another_and_each_once(house):
    first, second = house.groups
    flights = house.submit(6)
    await house.until(lambda: first.calls and second.calls)
    late = first.out[0]
    second.die()
    await house.until(lambda: house.replicas[1].state == "lost" and len(first.asked) == 4)
    assert house.metrics.retries == 3
    assert set(second.asked[:1]) <= set(first.asked)  # as many as it may hold
    first.answer(*first.asked)
    await house.until(lambda: len(first.asked) == 6)
    first.answer(*first.asked)
    results = await asyncio.gather(*(flight.result for flight in flights))
    assert sorted(result.id for result in results) == [f"mine-{number}" for number in range(6)]
    assert sorted(first.asked) == [f"fleet-{number}" for number in range(6)]
    assert late.done()
    assert house.router.idle


@with_house()
async def test_an_answer_of_a_process_that_was_given_up_does_not_count(house):
    first, second = house.groups
    (flight,) = house.submit(1)
    await house.until(lambda: first.calls)
    house.replicas[0].incarnation += 1
    house.replicas[0].state = "lost"
    house.router.wake()
    await house.until(lambda: second.calls)
    first.answer("fleet-0")
    await house.until(lambda: not first.out)
    await asyncio.sleep(0)
    assert not flight.result.done()
    second.answer("fleet-0")
    assert (await flight.result).id == "mine-0"


@with_house()
async def test_a_request_that_failed_since_the_engine_is_dead_goes_to_another(house):
    first, second = house.groups
    flights = house.submit(2)
    await house.until(lambda: first.calls and second.calls)
    house.ill.add(0)
    first.answer(fleet_0=RuntimeError("the engine is dead"))
    await house.until(lambda: len(second.asked) == 2)
    second.answer("fleet-0", "fleet-1")
    assert len(await asyncio.gather(*(flight.result for flight in flights))) == 2


@with_house(replicas=1)
async def test_a_request_that_failed_by_itself_is_its_callers(house):
    (group,) = house.groups
    flights = house.submit(2)
    await house.until(lambda: group.calls)
    group.answer("fleet-1", fleet_0=ValueError("such rows I do not draw"))
    assert (await flights[1].result).id == "mine-1"
    with pytest.raises(RemoteError, match=r"rollout-0 rank 0 .*such rows I do not draw"):
        await flights[0].result
    await house.until(lambda: house.router.idle)


@with_house(replicas=1)
async def test_an_answer_that_makes_no_sense_fails_all_that_the_replica_had(house):
    (group,) = house.groups
    flights = house.submit(2)
    await house.until(lambda: group.calls)
    drawn = [GenerateResult(f"fleet-{number}", (Completion([7], [-1.0], "stop", 1, 1),)) for number in (0, 1)]
    answer = AnswerBatch.pack(drawn, {})
    group.out[0].set_result(replace(answer, firsts=answer.firsts[:1]))
    for flight in flights:
        with pytest.raises(IndexError):
            await flight.result
    await house.until(lambda: house.router.idle)


@with_house(replicas=1)
async def test_requests_that_take_replica_after_replica_with_them_are_named(house):
    (group,) = house.groups
    poison, good = house.submit(2)
    await house.until(lambda: group.calls)
    group.answer("fleet-1")
    await good.result
    for tried in range(MOST_TRIES):
        await house.until(lambda: group.out)
        assert group.asked.count("fleet-0") == tried + 1
        group.die()
        await house.until(lambda: house.replicas[0].state == "lost")
        house.bring_back(0)
    with pytest.raises(PoisonousRows, match=r"(?s)requests 'mine-0' were lost 3 times.*rollout-0 died"):
        await poison.result
    assert house.router.idle


@with_house()
async def test_when_nobody_is_left_each_death_is_named(house):
    flights = house.submit(2)
    await house.until(lambda: all(group.calls for group in house.groups))
    for group in house.groups:
        group.die()
    for flight in flights:
        with pytest.raises(ReplicasLost, match=r"(?s)replica 0: rollout-0 died.*replica 1: rollout-1 died"):
            await flight.result


@with_house(limit=1)
async def test_a_replica_that_serves_again_takes_what_waits(house):
    first, second = house.groups
    house.submit(3)
    await house.until(lambda: first.calls and second.calls)
    second.die()
    await house.until(lambda: house.replicas[1].state == "lost")
    threading.Thread(target=house.bring_back, args=(1,)).start()
    await house.until(lambda: second.asked == ["fleet-1", "fleet-1"])
    assert house.metrics.queued >= 1


@with_house(replicas=1, limit=1)
async def test_a_request_nobody_waits_for_is_aborted_where_it_is_and_forgotten_where_it_waits(house):
    (group,) = house.groups
    held, waiting, wanted = house.submit(3)
    await house.until(lambda: group.calls)
    waiting.forget()
    held.forget()
    await house.until(lambda: group.aborted == ["fleet-0"])
    group.answer()  # the older call is released
    group.answer("fleet-0")
    await house.until(lambda: group.asked == ["fleet-0", "fleet-2"])
    group.answer("fleet-2")
    assert (await wanted.result).id == "mine-2"
    assert house.router.idle


@with_house()
async def test_a_cluster_that_is_lost_ends_all(house):
    flights = house.submit(2)
    await house.until(lambda: all(group.calls for group in house.groups))
    house.groups[0].out[0].set_exception(ClusterLost("gone"))
    for flight in flights:
        with pytest.raises(ClusterLost):
            await flight.result


@with_house()
async def test_what_each_replica_drew_is_counted(house):
    flights = house.submit(3)
    await house.until(lambda: all(group.calls for group in house.groups))
    house.groups[0].answer("fleet-0", "fleet-2")
    house.groups[1].answer("fleet-1")
    await house.until(lambda: all(flight.result.done() for flight in flights))
    drawn = house.metrics.drawn
    tokens = len(flights[0].result.result().completions[0].token_ids)
    assert {number: (one.tokens, one.steps) for number, one in drawn.items()} == {
        0: (2 * tokens, 2 * tokens),
        1: (tokens, tokens),
    }
    assert all(one.seconds > 0 for one in drawn.values())


class Process:
    """A replica's process at the worker's end: it draws what a test says, in whatever order, until it is lost."""

    def __init__(self):
        self.answers, self.held, self.lost = AnswerQueue(), {}, asyncio.get_running_loop().create_future()
        self.answered = []

    async def draw(self, requests, aborted):
        asking = self.answers.ask()
        for request in requests.unpack():
            self.held[request.id] = asyncio.get_running_loop().create_future()
            self.answers.add(asyncio.ensure_future(self.drawn(request)))
        for name in set(aborted) & self.held.keys():
            self.end(name)
        ended = [task.result() for task in await self.answers.ended(asking)]
        self.answered += [name for name, _ in ended]
        site = CallSite("rollout", 0, "here", 1, "generate")
        failures = {name: WorkerFailure.pack(error, site) for name, error in ended if isinstance(error, Exception)}
        return AnswerBatch.pack([result for _, result in ended if isinstance(result, GenerateResult)], failures)

    async def drawn(self, request):
        error = await self.held[request.id]
        del self.held[request.id]
        drawn = GenerateResult(request.id, (Completion([request.prompt_ids[0]], [-1.0], "stop", 1, 1),))
        return request.id, error or drawn

    def end(self, name, error=None):
        if not self.held[name].done():
            self.held[name].set_result(error)


class MortalGroup:
    """A replica whose processes answer by `AnswerQueue`."""

    def __init__(self, number):
        self.name, self.process = f"rollout-{number}", Process()

    def execute_rank_async(self, rank, method, requests, aborted):
        return asyncio.ensure_future(self.called(self.process, requests, aborted))

    async def called(self, process, requests, aborted):
        drawing = asyncio.ensure_future(process.draw(requests, aborted))
        await asyncio.wait((drawing, process.lost), return_when=asyncio.FIRST_COMPLETED)
        if process.lost.done():
            drawing.cancel()
            raise WorkerDied(f"{self.name} died")
        return drawing.result()

    def die(self):
        self.process.lost.set_result(None)


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_whatever_comes_ends_fails_is_given_up_or_dies_who_asks_hears_of_it_once(random):
    async def main():
        house = House(limit=random.choice([1, 3, 100]), kind=MortalGroup)
        asked, told, forgotten = [], [], set()

        def ask():
            asked.append(one := house.submit(1)[0])
            one.flight.ended = lambda flight: told.append((asked.index(one), flight))

        def give_up():
            if asked:
                forgotten.add(place := random.randrange(len(asked)))
                asked[place].forget()

        def end(group):
            if held := list(group.process.held):
                group.process.end(random.choice(held), random.choice([None, None, None, ValueError("no")]))

        def restart(number):
            group = house.groups[number]
            if house.replicas[number].state == "lost" and group.process.lost.done():
                group.process = Process()
                house.bring_back(number)

        for _ in range(random.randint(5, 60)):
            number = random.randrange(2)
            act = random.choice("aaaageeeeerrd")
            if act == "a":
                ask()
            elif act == "g":
                give_up()
            elif act == "e":
                end(house.groups[number])
            elif act == "r":
                restart(number)
            elif not house.groups[number].process.lost.done():
                house.groups[number].die()
            for _ in range(random.randrange(6)):
                await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            while not (house.router.idle and len({place for place, _ in told} | forgotten) == len(asked)):
                for number, group in enumerate(house.groups):
                    restart(number)
                    for name in list(group.process.held):
                        if int(name.removeprefix("fleet-")) not in forgotten:  # the others are aborted
                            group.process.end(name)
                await asyncio.sleep(0)
        places = [place for place, _ in told]
        for once in (places, *(group.process.answered for group in house.groups)):
            assert len(once) == len(set(once))
        for place, flight in told:
            assert flight is asked[place].flight
            assert (flight.answer is None) != (flight.error is None)
            assert flight.error is None or isinstance(flight.error, RemoteError | PoisonousRows | ReplicasLost)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "GATHERED_SECONDS", 0.0)
        asyncio.run(main())


@pytest.mark.parametrize(
    ("drawn", "slow"),
    [
        ({0: ReplicaCounts(80, 20, 4.0), 1: ReplicaCounts(80, 20, 8.0), 2: ReplicaCounts(80, 20, 4.4)}, (1, 8 / 4.2)),
        ({0: ReplicaCounts(80, 20, 8.0), 1: ReplicaCounts(20, 20, 4.0)}, (0, 0.5)),
        ({0: ReplicaCounts(80, 20, 4.0), 1: ReplicaCounts()}, None),
        ({0: ReplicaCounts(80, 20, 4.0)}, None),
    ],
    ids=["one takes twice as long", "one has more to do, the other less", "one drew nothing", "there is but one"],
)
def test_slow_is_who_takes_longer_and_draws_less_a_second(
    drawn: dict[int, ReplicaCounts], slow: tuple[int, float] | None
):
    busy = {number: one.seconds / 4 for number, one in drawn.items()}
    metrics = FleetMetrics()
    metrics.drawn.update(drawn)
    expected = {} if slow is None else {"slowest_replica": slow[0], "slowest": pytest.approx(slow[1])}
    assert metrics.slowest(busy) == expected
