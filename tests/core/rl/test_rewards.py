"""The reward pool, with functions that behave and functions that do not."""

import contextlib
import decimal
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy
import pytest

from enginehouse.rl.rewards.pool import RewardError, RewardPool

HERE = "tests.core.rl.test_rewards"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def length(prompt, response, *, scale=1.0, **columns):
    return len(response) * scale


def troubled(prompt, response, **columns):
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise ValueError("no digits in it")
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "text":
        return "1.0"
    if response == "nan":
        return float("nan")
    if response == "infinite":
        return numpy.float32("inf")
    return 1.0


class Peculiar(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


NUMBERS = {"numpy": numpy.float32(0.5), "int": 1, "bool": True, "decimal": decimal.Decimal("0.25")}


def number(prompt, response, **columns):
    return NUMBERS[response]


def slow(prompt, response, *, seconds, marks, **columns):
    """Leaves a mark a call; sleeps for `seconds` of the row's kind, else not at all."""
    with open(marks, "a") as file:
        file.write(f"{response}\n")
    time.sleep(seconds.get(response.rstrip("0123456789"), 0))
    return 1.0


def peculiar(prompt, response, **columns):
    raise Peculiar("quite", "odd")


def leaves(prompt, response, **columns):
    raise SystemExit(3)


def rows(*responses):
    return [{"prompt": "p", "response": response, "finish_reason": "stop"} for response in responses]


@pytest.fixture
def pool():
    pools = []

    def make(function, **kwargs):
        pools.append(RewardPool(f"{HERE}:{function}", python_path=[ROOT], **kwargs))
        return pools[-1]

    yield make
    for each in pools:
        each.close()


def test_scores_come_back_in_order(pool):
    rewards = pool("length", arguments={"scale": 2.0}, processes=2)
    responses = ["x" * (i % 7) for i in range(100)]
    expected = [2.0 * len(response) for response in responses]
    for _ in range(3):  # chunk sizes change as the cost of a row becomes known
        assert rewards.score(rows(*responses)) == expected
    assert rewards.score([]) == []


@pytest.mark.parametrize(
    ("response", "said"),
    [
        ("raise", "raised ValueError: no digits in it"),
        ("hang", "did not return within 0.5 s"),
        ("die", "took its process down"),
        ("text", "returned '1.0' \\(str\\) instead of a number"),
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
    ],
)
def test_a_row_without_a_score_fails_the_step_and_is_named(pool, response, said):
    rewards = pool("troubled", timeout_seconds=0.5)
    with pytest.raises(RewardError, match=said) as caught:
        rewards.score(rows("good", "good", response, "good"))
    for word in ("role reward", f"{HERE}:troubled", os.uname().nodename, "sample 2", "on_error=zero"):
        assert word in str(caught.value)


@pytest.mark.parametrize("response", ["raise", "hang", "die", "text", "nan", "infinite"])
def test_a_row_without_a_score_can_count_as_zero(pool, response):
    rewards = pool("troubled", timeout_seconds=0.5, on_error="zero")
    assert rewards.score(rows("good", response, "good")) == [1.0, 0.0, 1.0]
    assert rewards.failures == 1


def test_the_functions_own_traceback_is_shown(pool):
    with pytest.raises(RewardError, match="in troubled"):
        pool("troubled").score(rows("raise"))


def test_whatever_float_takes_is_a_reward(pool):
    assert pool("number").score(rows(*NUMBERS)) == [float(value) for value in NUMBERS.values()]


@pytest.mark.parametrize(("function", "said"), [("peculiar", "Peculiar: quite odd"), ("leaves", "SystemExit: 3")])
def test_any_exception_costs_only_its_row(pool, function, said):
    rewards = pool(function, on_error="zero")
    assert rewards.score(rows("a", "b")) == [0.0, 0.0]
    assert rewards.failures == 2
    with pytest.raises(RewardError, match=said):
        pool(function).score(rows("a"))


# Deadlines


def calls(marks: Path) -> list[str]:
    return marks.read_text().split()


def test_slow_rows_are_computed_once(pool, tmp_path):
    marks = tmp_path / "marks"
    rewards = pool("slow", arguments={"seconds": {"r": 0.15}, "marks": str(marks)}, timeout_seconds=0.5)
    for _ in range(2):  # with the cost of a row unknown, and known
        rewards.score(rows(*(f"r{i}" for i in range(6))))
    assert calls(marks) == [f"r{i}" for i in range(6)] * 2


def test_a_hanging_row_among_slow_ones_ends_after_one_deadline(pool, tmp_path):
    marks = tmp_path / "marks"
    seconds = {"r": 0.1, "hang": 3600}
    rewards = pool("slow", arguments={"seconds": seconds, "marks": str(marks)}, timeout_seconds=1.0, on_error="zero")
    for _ in range(2):
        assert rewards.score(rows("r0", "r1", "hang", "r2")) == [1.0, 1.0, 0.0, 1.0]
    assert sorted(calls(marks)) == sorted(["r0", "r1", "hang", "r2"] * 2)


def test_a_hanging_row_among_cheap_ones_costs_only_itself(pool, tmp_path):
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600}, "marks": str(marks)}
    rewards = pool("slow", arguments=arguments, timeout_seconds=0.5, on_error="zero")
    cheap = [f"r{i}" for i in range(50)]
    rewards.score(rows(*cheap))
    assert rewards.score(rows(*cheap, "hang", *cheap)) == [1.0] * 50 + [0.0] + [1.0] * 50
    assert rewards.failures == 1


@pytest.mark.parametrize("warm", [False, True])
def test_a_reward_that_hangs_on_every_row_ends_the_step(pool, tmp_path, warm):
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600, "r": 0.01}, "marks": str(marks)}
    rewards = pool("slow", arguments=arguments, timeout_seconds=0.3, on_error="zero")
    if warm:  # hangs come as a surprise, in chunks of several rows
        rewards.score(rows("r", "r", "r", "r"))
    with pytest.raises(RewardError, match="seems to hang on every row"):
        rewards.score(rows(*["hang"] * 200))
    assert calls(marks).count("hang") <= 6


# Processes


@pytest.mark.parametrize("on_error", ["fail", "zero"])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("if multiprocessing.parent_process(): raise OSError('no licence here')", "OSError: no licence here"),
        ("if multiprocessing.parent_process(): raise SystemExit('sorry')", "SystemExit: sorry"),
        ("if multiprocessing.parent_process(): os._exit(7)", "end before they score"),
    ],
)
def test_a_module_that_fails_only_in_the_pool_is_named(tmp_path, on_error, source, said):
    (tmp_path / "elsewhere.py").write_text(f"import multiprocessing, os\n{source}\ndef f(**columns): return 1.0\n")
    rewards = RewardPool("elsewhere:f", python_path=[str(tmp_path)], on_error=on_error)
    try:
        with pytest.raises(RewardError, match=said) as caught:
            rewards.score(rows("a", "b"))
        for word in ("role reward", "elsewhere:f", os.uname().nodename):
            assert word in str(caught.value)
    finally:
        rewards.close()


def test_closing_ends_a_pool_that_is_stuck(tmp_path):
    marks = tmp_path / "marks"
    arguments = {"seconds": {"hang": 3600}, "marks": str(marks)}
    rewards = RewardPool(f"{HERE}:slow", arguments, python_path=[ROOT], timeout_seconds=3600)
    before = set(multiprocessing.active_children())
    large = [{"prompt": "p" * 2**20, "response": "hang", "finish_reason": "stop"} for _ in range(8)]  # fills the pipe

    def score():
        with contextlib.suppress(RewardError):
            rewards.score(large)

    threading.Thread(target=score, daemon=True).start()
    while not marks.exists():
        time.sleep(0.01)
    rewards.close()
    assert set(multiprocessing.active_children()) <= before
