"""The reward pool where rows come as samples end: batches beside each other, whose rows come in groups."""

import asyncio
import os
import random
import signal
import threading
import time
from concurrent.futures import CancelledError, wait

import psutil
import pytest

from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.ray_access import ray_access
from enginehouse_rewards.pool import RewardError, RewardPool

FUNCTIONS = "tests.rewards.reward_functions"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
STYLES = ["waits", "waits_async", "waits_batched"]
EACH_STYLE = [STYLES[0], *(pytest.param(style, marks=pytest.mark.slow) for style in STYLES[1:])]
SECONDS = 60
"""Longest time a test waits for anything."""


def rows(*responses):
    return [{"prompt": "p", "messages": None, "response": response, "finish_reason": "stop"} for response in responses]


def rewards_of(future):
    return [score.reward for score in future.result(SECONDS)]


class Gates:
    """What `waits` and the like tell and are told."""

    def __init__(self, path):
        self.path = path

    def began(self):
        marks = self.path / "marks"
        return marks.read_text().split() if marks.exists() else []

    def wait_for(self, *responses):
        until = time.monotonic() + SECONDS
        while not set(responses) <= set(self.began()):
            assert time.monotonic() < until
            time.sleep(0.001)

    def open(self):
        (self.path / "go").touch()


@pytest.fixture
def gates(tmp_path):
    return Gates(tmp_path)


@pytest.fixture
def pool(gates):
    pools = []

    def make(function="waits", **kwargs):
        arguments = {"gates": str(gates.path)} if function in STYLES else {}
        pools.append(RewardPool(f"{FUNCTIONS}:{function}", arguments, python_path=[ROOT], **kwargs))
        return pools[-1]

    yield make
    gates.open()
    for each in pools:
        each.close()


def test_the_function_is_imported_while_engines_start_and_not_when_rows_come(tmp_path):
    (tmp_path / "noted.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\ndef one(**columns): return 1.0"
    )
    rewards = RewardPool("noted:one", python_path=[str(tmp_path)])
    until = time.monotonic() + SECONDS
    while not (tmp_path / "imported").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [score.reward for score in rewards.score(rows("a"))] == [1.0]
    rewards.close()


# Each row gets its own score, once


@pytest.mark.parametrize("function", STYLES)
def test_each_row_gets_its_own_score_where_batches_interleave(pool, gates, function):
    rewards = pool(function, processes=2)
    chance = random.Random(0)
    lengths = chance.sample(range(1, 1000), 240)  # no two rows have the same score
    groups = [lengths[start : start + 8] for start in range(0, 240, 8)]
    batches = [rewards.batch(120), rewards.batch(120)]
    futures = [batches[number % 2].submit(rows(*("x" * n for n in group))) for number, group in enumerate(groups)]
    assert [rewards_of(future) for future in futures] == groups
    assert sorted(map(len, gates.began())) == sorted(lengths)


def test_threads_may_submit_at_once(pool):
    rewards = pool("length", processes=2)
    got = {}

    def submit(first):
        batch = rewards.batch(100)
        futures = [batch.submit(rows("x" * (first + n))) for n in range(100)]
        got[first] = [rewards_of(future) for future in futures]

    threads = [threading.Thread(target=submit, args=(first,), daemon=True) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert got == {first: [[first + n] for n in range(100)] for first in (0, 1000, 2000)}


def test_scores_come_as_rows_end_and_not_after_the_last(pool, gates):
    rewards = pool(processes=2)
    batch = rewards.batch(3)
    slow, quick = batch.submit(rows("wait")), batch.submit(rows("a", "bb"))
    assert rewards_of(quick) == [1.0, 2.0]
    assert not slow.done()
    gates.open()
    assert rewards_of(slow) == [4.0]


async def test_an_asyncio_loop_awaits_scores(pool):
    rewards = pool("length")
    batch = rewards.batch(8)
    groups = [batch.submit(rows("x" * n, "x")) for n in range(4)]
    scores = await asyncio.gather(*map(asyncio.wrap_future, groups))
    assert [[score.reward for score in group] for group in scores] == [[n, 1] for n in range(4)]


def test_no_rows_are_scored_at_once(pool):
    assert pool("length").batch(8).submit([]).result(SECONDS) == []


# A batched reward


def test_a_batched_reward_gets_the_rows_that_wait_in_one_call_but_never_those_of_two_batches(pool, gates):
    rewards = pool("waits_batched")
    busy = rewards.batch(1).submit(rows("wait"))
    gates.wait_for("wait")
    first, second = rewards.batch(8), rewards.batch(6)
    groups = [batch.submit(rows("a", "b")) for batch in (first, second, first, second, first, second, first)]
    gates.open()
    calls = [[score.figures["calls"] for score in group.result(SECONDS)] for group in [busy, *groups]]
    assert calls == [[1.0], *([[8.0] * 2, [6.0] * 2] * 4)[:7]]


def test_a_batched_reward_gets_at_most_an_equal_share_of_the_rows_expected(pool):
    calls = [score.figures["calls"] for score in pool("waits_batched", processes=2).score(rows(*"abcde"))]
    assert calls == [3.0, 3.0, 3.0, 2.0, 2.0]


# Processes


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another batch"])
@pytest.mark.parametrize("function", EACH_STYLE)
def test_a_process_that_dies_between_two_groups_costs_nothing(pool, gates, function, beside):
    rewards = pool(function, processes=1 + beside, concurrency=1, timeout_seconds=3600)
    batch = rewards.batch(32)
    other = rewards.batch(1).submit(rows("wait")) if beside else None
    if beside:
        gates.wait_for("wait")
    for number in range(2):
        (first,) = batch.submit(rows(f"{number}a")).result(SECONDS)  # not by the process that waits
        idle = psutil.Process(int(first.figures["pid"]))
        idle.kill()
        assert rewards_of(batch.submit(rows(f"{number}b", f"{number}c"))) == [2.0, 2.0]
    gates.open()
    assert other is None or rewards_of(other) == [4.0]
    assert sorted(gates.began()) == sorted([*["wait"] * beside, *(f"{n}{x}" for n in range(2) for x in "abc")])


@pytest.mark.parametrize("function", EACH_STYLE)
def test_rows_of_two_batches_lose_their_process_and_each_gets_its_score(pool, gates, function):
    rewards = pool(function, on_error="zero", timeout_seconds=3600)
    rewards.score(rows("a"))
    first, second = rewards.batch(3), rewards.batch(2)
    futures = [first.submit(rows("a", "die", "aaa")), second.submit(rows("bbbb", "bbbbb"))]
    assert [rewards_of(future) for future in futures] == [[1.0, 0.0, 3.0], [4.0, 5.0]]
    assert gates.began().count("die") <= 3  # with others, alone, and once more


@pytest.mark.slow
def test_rows_do_not_join_one_that_may_end_its_process(pool, gates):
    rewards = pool("waits_async", on_error="zero", concurrency=2)
    assert rewards_of(rewards.batch(6).submit(rows("die", *"abcde"))) == [0.0, *[1.0] * 5]
    assert all(gates.began().count(one) == 1 for one in "bcde")  # only `a` was there when it died first


# An error is its batch's


@pytest.mark.parametrize("function", EACH_STYLE)
def test_an_error_of_one_batch_is_not_the_others(pool, gates, function):
    rewards = pool(function, processes=2, concurrency=1)
    broken, sound = rewards.batch(3), rewards.batch(3)
    begun, failing = sound.submit(rows("wait-a")), broken.submit(rows("raise", "b"))
    broken.submit(rows("c"))
    with pytest.raises(RewardError, match="sample 0 of 3 raised ValueError"):
        failing.result(SECONDS)
    late = sound.submit(rows("d", "e"))
    gates.open()
    assert rewards_of(begun) == [6.0]
    assert rewards_of(late) == [1.0, 1.0]
    assert gates.began().count("wait-a") == 1
    with pytest.raises(RewardError, match="sample 0 of 3 raised ValueError"):  # it ends what is submitted after it
        broken.submit(rows("f")).result(SECONDS)
    assert "f" not in gates.began()


@pytest.mark.slow
def test_a_row_that_hangs_ends_its_batch_after_a_deadline_and_no_other(pool, gates):
    rewards = pool(processes=2, timeout_seconds=2)
    hanging, sound = rewards.batch(64), rewards.batch(64)
    lost = hanging.submit(rows("wait"))
    for _ in range(3):
        assert rewards_of(sound.submit(rows("a", "b"))) == [1.0, 1.0]
    with pytest.raises(RewardError, match="sample 0 of 64 did not return within 2 s"):
        lost.result(SECONDS)
    assert rewards_of(sound.submit(rows("a", "b"))) == [1.0, 1.0]


@pytest.mark.slow
def test_what_holds_a_failing_batch_up_is_ended_with_it(pool, gates):
    rewards = pool(processes=3, timeout_seconds=3600)
    batch = rewards.batch(8)
    batch.submit(rows("wait", "wait"))
    gates.wait_for("wait")
    with pytest.raises(RewardError, match="at fault"):
        batch.submit(rows(*["raise"] * 6)).result(SECONDS)
    assert rewards_of(rewards.batch(2).submit(rows("a", "b"))) == [1.0, 1.0]
    assert not (gates.path / "go").exists()


def test_failures_count_over_all_groups_of_a_batch(pool):
    rewards = pool("troubled", on_error="zero", max_failures=0.25)
    batch, other = rewards.batch(16), rewards.batch(16)
    for _ in range(2):
        assert rewards_of(batch.submit(rows("raise", "raise", "good"))) == [0.0, 0.0, 1.0]
        assert rewards_of(other.submit(rows("raise", "raise", "good"))) == [0.0, 0.0, 1.0]
    with pytest.raises(RewardError, match=r"5 of 8 rows that were tried got no score.*sample 0 of 16 raised"):
        batch.submit(rows("good", "raise")).result(SECONDS)
    assert rewards_of(other.submit(rows("good"))) == [1.0]


def test_a_batch_with_a_failed_row_ends_though_not_all_its_rows_come(pool):
    rewards = pool("troubled", timeout_seconds=0.2)
    batch = rewards.batch(100)
    failing = batch.submit(rows("raise"))
    with pytest.raises(RewardError, match=r"sample 0 of 100 raised(.|\n)*on_error=zero"):
        failing.result(SECONDS)


def test_a_row_that_cannot_be_sent_ends_its_batch_alone(pool, gates):
    rewards = pool()
    sound = rewards.batch(1).submit(rows("wait"))
    gates.wait_for("wait")
    unsent = rewards.batch(1).submit([{**rows("a")[0], "extra": lambda: None}])
    gates.open()
    with pytest.raises(Exception, match="pickle"):
        unsent.result(SECONDS)
    assert rewards_of(sound) == [4.0]
    assert rewards_of(rewards.batch(1).submit(rows("ab"))) == [2.0]


def test_what_ends_the_pool_ends_all_batches(pool, gates, monkeypatch):
    rewards = pool(processes=2, timeout_seconds=3600)
    futures = [rewards.batch(2).submit(rows("wait")) for _ in range(2)]

    def lost():
        raise ClusterLost("the control service ended")

    monkeypatch.setattr(ray_access, "look", lost)
    for future in futures:
        with pytest.raises(ClusterLost):
            future.result(SECONDS)
    monkeypatch.undo()
    assert rewards_of(rewards.batch(1).submit(rows("a"))) == [1.0]


def test_closing_ends_all_batches(pool, gates):
    rewards = pool(processes=2, timeout_seconds=3600)
    batches = [rewards.batch(16) for _ in range(2)]
    futures = [batch.submit(rows("wait", *"abc")) for batch in batches for _ in range(2)]
    gates.wait_for("wait")
    rewards.close()
    for future in [*futures, batches[0].submit(rows("a"))]:
        with pytest.raises(RewardError, match="the pool was closed"):
            future.result(0)
    rewards.close()


# Giving up


@pytest.mark.parametrize("function", EACH_STYLE)
def test_rows_nobody_waits_for_are_not_scored(pool, gates, function):
    rewards = pool(function, concurrency=1)
    batch = rewards.batch(16)
    begun = batch.submit(rows("wait"))
    gates.wait_for("wait")
    unwanted, wanted = batch.submit(rows("a", "b")), batch.submit(rows("ccc"))
    assert unwanted.cancel()
    assert wait([unwanted], SECONDS).done
    gates.open()
    assert rewards_of(begun) == [4.0]
    assert rewards_of(wanted) == [3.0]
    with pytest.raises(CancelledError):
        unwanted.result(0)
    assert gates.began() == ["wait", "ccc"]


def test_a_row_that_fails_when_nobody_waits_for_it_any_more_ends_nothing(pool, gates):
    rewards = pool(on_error="fail", max_failures=0)
    batch = rewards.batch(16)
    begun = batch.submit(rows("wait-raise"))
    gates.wait_for("wait-raise")
    assert begun.cancel()
    gates.open()
    assert rewards_of(batch.submit(rows("a"))) == [1.0]


async def test_a_waiting_task_that_is_cancelled_gives_its_rows_up(pool, gates):
    rewards = pool()
    batch = rewards.batch(3)
    begun = asyncio.wrap_future(batch.submit(rows("wait")))
    unwanted = asyncio.wrap_future(batch.submit(rows("a")))
    await asyncio.to_thread(gates.wait_for, "wait")
    unwanted.cancel()
    await asyncio.wait([unwanted])
    gates.open()
    await begun
    await asyncio.wrap_future(batch.submit(rows("b")))
    assert gates.began() == ["wait", "b"]


def test_an_interrupt_gets_out_of_score_at_once_and_leaves_processes_to_be_ended(gates):
    rewards = RewardPool(f"{FUNCTIONS}:waits", {"gates": str(gates.path)}, python_path=[ROOT], timeout_seconds=3600)

    def interrupt():
        gates.wait_for("wait")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        rewards.score(rows("wait", "a"))
    processes = [process for process in psutil.Process().children() if "rewards.program" in "".join(process.cmdline())]
    assert processes
    rewards.close()
    assert not [process for process in processes if process.is_running()]
    assert gates.began() == ["wait"]
