"""Which replica draws which requests: each once, whatever replicas do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.fleet.balancer import Entry, PrefixMemory, ReplicaBalancer, hash_prefixes

REPLICAS = 4


def entries(count: int, samples: int = 1) -> list[Entry]:
    return [Entry(number, samples) for number in range(count)]


def balancer_of(given: list[Entry], limit: int, *replicas: int) -> ReplicaBalancer:
    balancer = ReplicaBalancer(limit)
    for entry in given:
        balancer.add(entry)
    for replica in replicas:
        balancer.join(replica)
    return balancer


@pytest.mark.slow
@given(data=st.data(), count=st.integers(1, 30), samples=st.integers(1, 6), limit=st.integers(1, 12))
def test_whatever_replicas_do_every_request_is_counted_once_and_none_is_lost(data, count, samples, limit):
    """Requests and answers in any order, deaths and returns at any time, requests nobody wants, answers of the dead."""
    balancer = balancer_of([], limit, 0)
    coming, serving, flying, stale, counted, dropped = entries(count, samples), {0}, [], [], [], []
    for _ in range(10 * count):
        for attempt in balancer.assign():
            assert attempt.replica in serving
            flying.append(attempt)
        held = {replica: [a for a in flying if a.replica == replica] for replica in serving}
        for replica, mine in held.items():
            assert balancer.list_attempts(replica) == mine
            assert balancer.load(replica) == sum(attempt.entry.samples for attempt in mine)
            assert len(mine) <= 1 or balancer.load(replica) <= limit
        assert not balancer.waiting or not serving or all(held.values())  # nobody is idle while requests wait
        assert balancer.waiting_samples == samples * balancer.waiting
        moves = ["come"] * bool(coming) + ["answer"] * bool(flying) + ["die"] * bool(serving) + ["late"] * bool(stale)
        move = data.draw(st.sampled_from([*moves, "join", "drop"]))
        if move == "come":
            balancer.add(coming.pop(0))
        elif move == "drop":
            number = data.draw(st.integers(0, count - 1))
            known = number not in [entry.number for entry in coming] + counted + dropped
            attempt = balancer.drop(number)
            assert attempt == next((one for one in flying if one.entry.number == number), None)
            if known and attempt is None:
                dropped.append(number)
        elif move == "answer":
            attempt = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            assert balancer.finish(attempt)
            counted.append(attempt.entry.number)
        elif move == "late":
            assert not balancer.finish(data.draw(st.sampled_from(stale)))
        elif move == "join":
            who = data.draw(st.integers(0, REPLICAS - 1))
            balancer.join(who)
            serving.add(who)
        else:
            who = data.draw(st.sampled_from(sorted(serving)))
            dead = [attempt for attempt in flying if attempt.replica == who]
            assert {entry.number for entry in balancer.leave(who)} == {attempt.entry.number for attempt in dead}
            flying = [attempt for attempt in flying if attempt.replica != who]
            stale += dead
            serving.discard(who)
    balancer.join(0)
    for entry in coming:
        balancer.add(entry)
    while not balancer.done:  # from now on nothing happens but answers
        flying += balancer.assign()
        attempt = flying.pop()
        assert balancer.finish(attempt)
        assert not balancer.finish(attempt)
        counted.append(attempt.entry.number)
    assert sorted(counted + dropped) == list(range(count))


def test_the_one_with_the_least_to_do_is_next():
    balancer = balancer_of(entries(3), 10, 0, 1)
    first, second, _ = balancer.assign()
    assert {first.replica, second.replica} == {0, 1}
    balancer = balancer_of([Entry(0, 5), *entries(5)[1:]], 10, 0, 1)
    assert [attempt.replica for attempt in balancer.assign()] == [0, 1, 1, 1, 1]


def test_what_a_dead_replica_held_comes_before_what_never_was_given():
    balancer = balancer_of(entries(4), 1, 0, 1)
    held = {attempt.replica: attempt.entry.number for attempt in balancer.assign()}
    balancer.leave(1)
    balancer.join(2)
    assert [attempt.entry.number for attempt in balancer.assign()] == [held[1]]


def test_a_request_knows_how_often_it_was_tried():
    balancer = balancer_of(entries(1), 1, 0)
    (attempt,) = balancer.assign()
    balancer.leave(0)
    balancer.join(1)
    balancer.assign()
    assert balancer.tries(attempt.entry.number) == 2


# Prefixes


def prompts(*rows: list[int]) -> list[Entry]:
    return [Entry(number, 1, hash_prefixes(np.array(row))) for number, row in enumerate(rows)]


@pytest.fixture
def shared():
    """Two prompts that begin with the same 40 tokens, and two that begin otherwise."""
    same, other = list(range(40)), list(range(100, 140))
    return prompts([*same, 1], [*other, 2], [*other, 3], [*same, 4])


def test_a_prompt_goes_where_its_beginning_was_seen(shared):
    balancer = balancer_of(shared, 512, 0, 1)
    where = [attempt.replica for attempt in balancer.assign()]
    assert where[0] == where[3]
    assert where[1] == where[2]
    assert where[0] != where[1]


def test_a_later_turn_goes_where_its_episode_is_though_all_have_the_same_instructions():
    instructions = list(range(2000))
    first = [[*instructions, *[3000 + episode] * 200] for episode in range(4)]
    balancer = balancer_of(prompts(*first), 512, 0, 1)
    attempts = balancer.assign()
    where = [attempt.replica for attempt in attempts]
    assert sorted(where) == [0, 0, 1, 1]
    for attempt in attempts:
        balancer.finish(attempt)
    order = sorted(range(4), key=where.__getitem__)
    for entry in prompts(*[[*first[episode], *range(5000, 5100)] for episode in order]):
        balancer.add(entry)
    assert [attempt.replica for attempt in balancer.assign()] == [where[episode] for episode in order]


def test_what_was_seen_is_remembered_over_calls_until_caches_are_dropped(shared):
    memory = PrefixMemory()
    memory.remember(shared[0], 7)
    assert memory.replica(shared[3]) == 7
    assert memory.replica(shared[1]) is None
    memory.forget(8)
    assert memory.replica(shared[3]) == 7
    memory.forget(7)
    assert memory.replica(shared[3]) is None
    memory.remember(shared[0], 7)
    memory.forget()
    assert memory.replica(shared[3]) is None


def test_a_shared_beginning_does_not_leave_the_others_idle():
    same = prompts(*[[*range(64), row] for row in range(16)])
    balancer = balancer_of(same, 512, 0, 1)
    where = [attempt.replica for attempt in balancer.assign()]
    assert abs(where.count(0) - where.count(1)) <= 1
