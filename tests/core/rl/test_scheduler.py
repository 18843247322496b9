"""Which replica draws which rows: each row once, whatever replicas do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.rl.scheduler import Piece, PrefixMemory, Scheduler, cut, pieces_each

REPLICAS = 4


def prompts(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row) for row in rows]


def pieces(count: int, samples: int = 1) -> list[Piece]:
    return [Piece(number, number, number + 1, samples) for number in range(count)]


def scheduler_of(given: list[Piece], limit: int, *replicas: int) -> Scheduler:
    scheduler = Scheduler(given, limit)
    for replica in replicas:
        scheduler.join(replica)
    return scheduler


@given(
    rows=st.integers(0, 200),
    samples=st.integers(1, 64),
    replicas=st.integers(1, 8),
    limit=st.integers(1, 1000),
    pieces=st.integers(4, 16),
)
def test_pieces_are_the_rows_in_order_and_a_replica_may_hold_several(rows, samples, replicas, limit, pieces):
    made = cut(prompts(*[[row] for row in range(rows)]), samples, replicas, limit, pieces)
    assert [row for piece in made for row in range(piece.begin, piece.end)] == list(range(rows))
    assert [piece.number for piece in made] == list(range(len(made)))
    for piece in made:
        assert piece.samples == (piece.end - piece.begin) * samples
        assert piece.end - piece.begin == 1 or piece.samples <= limit / pieces


def test_there_are_pieces_enough_for_a_slow_replica_to_get_fewer():
    assert len(cut(prompts(*[[row] for row in range(64)]), 1, 2, 512)) == 8


def test_the_longer_completions_may_be_the_smaller_are_the_pieces():
    assert [pieces_each(tokens) for tokens in (0, 7, 64, 128, 100_000)] == [4, 4, 4, 8, 16]
    assert [pieces_each(tokens, fewest=1) for tokens in (0, 7, 64)] == [1, 1, 4]


@given(data=st.data(), count=st.integers(1, 30), samples=st.integers(1, 6), limit=st.integers(1, 12))
def test_whatever_replicas_do_every_piece_is_counted_once_and_none_is_lost(data, count, samples, limit):
    """Answers in any order, deaths and returns at any time, and answers of the dead."""
    scheduler = scheduler_of(pieces(count, samples), limit, 0)
    serving, flying, stale, counted, lost = {0}, [], [], [], 0
    for _ in range(10 * count):
        for attempt in scheduler.assign():
            assert attempt.replica in serving
            flying.append(attempt)
        held = {replica: [a for a in flying if a.replica == replica] for replica in serving}
        for mine in held.values():
            assert len(mine) <= 1 or sum(attempt.piece.samples for attempt in mine) <= limit
        assert not scheduler.waiting or not serving or all(held.values())  # nobody is idle while rows wait
        moves = ["answer"] * bool(flying) + ["die"] * bool(serving) + ["late"] * bool(stale)
        move = data.draw(st.sampled_from([*moves, "join"]))
        if move == "answer":
            attempt = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            assert scheduler.finish(attempt)
            counted.append(attempt.piece.number)
        elif move == "late":
            assert not scheduler.finish(data.draw(st.sampled_from(stale)))
        elif move == "join":
            who = data.draw(st.integers(0, REPLICAS - 1))
            scheduler.join(who)
            serving.add(who)
        else:
            who = data.draw(st.sampled_from(sorted(serving)))
            dead = [attempt for attempt in flying if attempt.replica == who]
            assert {piece.number for piece in scheduler.leave(who)} == {attempt.piece.number for attempt in dead}
            flying = [attempt for attempt in flying if attempt.replica != who]
            stale += dead
            lost += len(dead)
            serving.discard(who)
    scheduler.join(0)
    while not scheduler.done:  # from now on nothing happens but answers
        flying += scheduler.assign()
        attempt = flying.pop()
        assert scheduler.finish(attempt)
        assert not scheduler.finish(attempt)
        counted.append(attempt.piece.number)
    assert sorted(counted) == list(range(count))
    assert scheduler.retries == lost


def test_the_one_with_the_least_to_do_is_next():
    scheduler = scheduler_of(pieces(3), 10, 0, 1)
    first, second, _ = scheduler.assign()
    assert {first.replica, second.replica} == {0, 1}
    scheduler = scheduler_of([Piece(0, 0, 1, 5), *pieces(5)[1:]], 10, 0, 1)
    assert [attempt.replica for attempt in scheduler.assign()] == [0, 1, 1, 1, 1]


def test_what_a_dead_replica_held_comes_before_what_never_was_given():
    scheduler = scheduler_of(pieces(4), 1, 0, 1)
    held = {attempt.replica: attempt.piece.number for attempt in scheduler.assign()}
    scheduler.leave(1)
    scheduler.join(2)
    assert [attempt.piece.number for attempt in scheduler.assign()] == [held[1]]


def test_a_piece_knows_how_often_it_was_tried():
    scheduler = scheduler_of(pieces(1), 1, 0)
    (attempt,) = scheduler.assign()
    scheduler.leave(0)
    scheduler.join(1)
    scheduler.assign()
    assert scheduler.tries(attempt.piece) == 2


# Prefixes


@pytest.fixture
def shared():
    """Two prompts that begin with the same 40 tokens, and two that begin otherwise."""
    same, other = list(range(40)), list(range(100, 140))
    return cut(prompts([*same, 1], [*other, 2], [*other, 3], [*same, 4]), 1, 4, 512)


def test_a_prompt_goes_where_its_beginning_was_seen(shared):
    scheduler = scheduler_of(shared, 512, 0, 1)
    where = [attempt.replica for attempt in scheduler.assign()]
    assert where[0] == where[3]
    assert where[1] == where[2]
    assert where[0] != where[1]


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
    same = cut(prompts(*[[*range(64), row] for row in range(16)]), 1, 4, 512)
    scheduler = scheduler_of(same, 512, 0, 1)
    where = [attempt.replica for attempt in scheduler.assign()]
    assert abs(where.count(0) - where.count(1)) <= 1
