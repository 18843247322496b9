"""The reward pool, with functions that behave and functions that do not."""

import os
import signal
import time

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
    return 1.0


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
        ("text", "instead of a number"),
    ],
)
def test_a_row_without_a_score_fails_the_step_and_is_named(pool, response, said):
    rewards = pool("troubled", timeout_seconds=0.5)
    with pytest.raises(RewardError, match=said) as caught:
        rewards.score(rows("good", "good", response, "good"))
    for word in ("role reward", f"{HERE}:troubled", os.uname().nodename, "sample 2", "on_error=zero"):
        assert word in str(caught.value)


@pytest.mark.parametrize("response", ["raise", "hang", "die", "text"])
def test_a_row_without_a_score_can_count_as_zero(pool, response):
    rewards = pool("troubled", timeout_seconds=0.5, on_error="zero")
    assert rewards.score(rows("good", response, "good")) == [1.0, 0.0, 1.0]
    assert rewards.failures == 1


def test_the_functions_own_traceback_is_shown(pool):
    with pytest.raises(RewardError, match="in troubled"):
        pool("troubled").score(rows("raise"))
