"""Several rewards of a run: each scored by itself, and one number made of them."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch
from enginehouse_rewards.pool import RewardError
from enginehouse_rl.config.schema import RewardConfig
from enginehouse_rl.plan.rewards import RewardPlan
from enginehouse_rl.rewards.weighted import WeightedRewards, with_rewards

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
FUNCTIONS = "tests.rewards.reward_functions"


def planned(**functions):
    given = RewardConfig(functions=functions).list_rewards()
    return tuple(RewardPlan(name, one.function, one.arguments, one) for name, one in given.items())


@pytest.fixture
def score(tmp_path):
    """Score responses, by config."""

    def score(*responses, on_error="fail", **functions):
        config = SimpleNamespace(reward=RewardConfig(functions=functions, on_error=on_error, max_failures=1))
        given = planned(**functions)
        plan = SimpleNamespace(config=config, rewards=given, benchmarks=(), python_path=(ROOT,), run_directory=tmp_path)
        rewards = WeightedRewards(plan)
        rows = [{"prompt": "p", "response": response, "finish_reason": "stop"} for response in responses]
        try:
            return asyncio.run(asyncio.wait_for(rewards.scorer(len(rows))(rows), 60))
        finally:
            rewards.close()

    return score


LONG = {"function": f"{FUNCTIONS}:length", "arguments": {"scale": 1.0}}
FIGURED = {"function": f"{FUNCTIONS}:figures"}
TROUBLED = {"function": f"{FUNCTIONS}:troubled"}


def test_a_score_is_the_weighted_sum_of_clipped_ones_and_each_is_logged_as_it_was(score):
    scores = score("good", "x", long={**LONG, "weight": 0.5, "clip": [0, 3]}, twice={**LONG, "weight": -1.0})
    assert [one.reward for one in scores] == [0.5 * 3 - 4, 0.5 - 1]
    assert [one.figures for one in scores] == [{"long": 4.0, "twice": 4.0}, {"long": 1.0, "twice": 1.0}]


def test_figures_of_one_of_several_have_its_name_before_theirs(score):
    (one,) = score("good", long=LONG, right=FIGURED)
    assert one.figures == {"long": 4.0, "right": 1.0, "right.format": 4.0}


def test_the_answer_is_that_of_the_first_reward_that_says_one(score):
    answers = {"function": f"{FUNCTIONS}:answers"}
    exact = {"function": "enginehouse_rewards.builtin.exact_match:exact_match", "arguments": {"answer": "8"}}
    scores = score("good 7", "8", "none", long=LONG, first=answers, second=exact)
    assert [one.answer for one in scores] == ["7", "8", "none"]
    assert all("first.answer" not in one.figures for one in scores)


def test_a_reward_without_a_score_counts_zero_beside_the_others(score, tmp_path):
    scores = score("good", "raise", on_error="zero", long=LONG, troubled=TROUBLED)
    assert [one.reward for one in scores] == [5.0, 5.0]
    assert [one.figures.get("troubled") for one in scores] == [1.0, None]
    assert [one.failure for one in scores] == ["", "troubled raised ValueError: no digits in it"]
    assert "raised ValueError" in (tmp_path / "reward_error.troubled.txt").read_text()


@pytest.mark.parametrize("on_error", ["fail", "zero", "leave_out"])
def test_a_reward_that_abstains_has_no_part_in_the_sum_and_is_no_failure(score, on_error):
    abstaining = {"function": f"{FUNCTIONS}:long_alone", "weight": 2.0}
    scores = score("good", "x", on_error=on_error, long=LONG, abstaining=abstaining)
    assert [(one.reward, one.figures, one.failure) for one in scores] == [
        (6.0, {"long": 4.0, "abstaining": 1.0}, ""),
        (1.0, {"long": 1.0}, ""),
    ]


def test_a_row_from_which_all_abstain_has_no_score(score):
    both = {name: {"function": f"{FUNCTIONS}:long_alone"} for name in ("one", "other")}
    with pytest.raises(RewardError, match="every reward abstained"):
        score("good", "x", **both)
    assert [one.failure for one in score("good", "x", on_error="zero", **both)] == ["", "every reward abstained"]


def test_the_only_reward_may_not_abstain(score):
    (one,) = score("x", on_error="zero", alone={"function": f"{FUNCTIONS}:long_alone"})
    assert "returned None" in one.failure


def test_who_abstains_has_no_part_in_what_is_normalised():
    rewards = planned(one={**LONG, "normalize": "group"}, other=LONG)
    figures = [{"one": 1.0, "other": 0.0}, {"one": 3.0, "other": 0.0}, {"other": 5.0}]
    rows = {"reward_figures": figures, "reward_failure": [""] * 3, "reward": torch.tensor([1.0, 3.0, 5.0])}
    rows |= {"group": torch.zeros(3).long(), "episode": torch.arange(3)}
    given = with_rewards(DistributedBatch.of([Batch(rows)]), rewards)["reward"].tolist()
    assert given == pytest.approx([-(0.5**0.5), 0.5**0.5, 5.0], rel=1e-5)


def test_a_reward_without_a_score_counts_zero_also_where_zero_would_be_clipped(score):
    scores = score("good", "raise", on_error="zero", troubled={**TROUBLED, "clip": [0.5, 1.0], "normalize": "none"})
    assert [one.reward for one in scores][1] == 0.0


def test_a_reward_that_fails_ends_the_others_and_is_named(score):
    slow = {"function": f"{FUNCTIONS}:slow", "arguments": {"seconds": {"raise": 3600}, "marks": os.devnull}}
    with pytest.raises(RewardError, match=r"role reward troubled, method .*raised ValueError"):
        score("raise", slow=slow, troubled=TROUBLED)


def samples(*figures, group=(0, 0, 1, 1), rewards=None):
    batch = Batch(
        {
            "reward": torch.tensor(rewards or [0.0] * len(figures)),
            "group": torch.tensor(group),
            "episode": torch.arange(len(figures)),
            "reward_figures": list(figures),
        }
    )
    return DistributedBatch.of([batch.slice(0, 1), batch.slice(1, len(batch))])


FIGURES = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 0.0, "b.c": 5.0}, {"a": 7.0, "b": 0.5}, {}]


def test_rewards_are_a_column_in_the_order_of_the_config():
    made = with_rewards(
        samples(*FIGURES, rewards=[1.0, 2.0, 3.0, 4.0]),
        planned(b={"function": "x", "clip": [0, 1]}, a={"function": "y"}),
    )
    assert made["rewards"].dtype == torch.float32
    assert made["rewards"].tolist() == [[1.0, 1.0], [0.0, 3.0], [0.5, 7.0], [0.0, 0.0]]
    assert made["reward"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_only_reward_is_a_column_too():
    (one,) = (RewardPlan("", one.function, {}, one) for one in RewardConfig(function="x").list_rewards().values())
    made = with_rewards(samples({}, {}, group=(0, 0), rewards=[1.0, 2.0]), (one,))
    assert made["rewards"].tolist() == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("group", [-(0.5**0.5), 0.5**0.5, 0.5**0.5, -(0.5**0.5)]),
        ("batch", [-1.75 / 3.0957, 0.25 / 3.0957, 4.25 / 3.0957, -2.75 / 3.0957]),
    ],
)
def test_a_reward_may_be_normalised_over_its_group_or_the_step(normalize, expected):
    both = {"a": {"function": "x", "weight": 2.0, "normalize": normalize}, "b": {"function": "y", "clip": [0, 1]}}
    made = with_rewards(samples(*FIGURES, rewards=[3.0, 6.0, 14.5, 0.0]), planned(**both))
    plain = torch.tensor([1.0, 0.0, 0.5, 0.0])
    torch.testing.assert_close(made["reward"], 2 * torch.tensor(expected) + plain, atol=1e-4, rtol=0)
    assert made["rewards"][:, 0].tolist() == [1.0, 3.0, 7.0, 0.0]


def test_where_all_scores_are_equal_a_normalised_one_is_zero():
    same = [{"a": 0.1}] * 4
    made = with_rewards(samples(*same, rewards=[0.1] * 4), planned(a={"function": "x", "normalize": "group"}))
    assert made["reward"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("figures", "rewards", "expected"),
    [
        # an environment that adds a bonus to what it was scored; the same scores, without it
        ([0.2, 0.1, 0.3, 0.2], [1.2, 0.1, 1.3, 0.2], [1.0, -1.2247, 2.2247, 0.0]),
        ([0.2, 0.1, 0.3, 0.2], [0.2, 0.1, 0.3, 0.2], [0.0, -1.2247, 1.2247, 0.0]),
        # a game that scores itself and never asks for the reward
        ([None] * 4, [1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]),
    ],
)
@pytest.mark.parametrize("normalize", ["group", "batch"])
def test_what_the_environment_scored_itself_is_added_to_normalised_rewards(normalize, figures, rewards, expected):
    rows = [{} if figure is None else {"a": figure} for figure in figures]
    made = with_rewards(
        samples(*rows, group=(0, 0, 0, 0), rewards=rewards), planned(a={"function": "x", "normalize": normalize})
    )
    torch.testing.assert_close(made["reward"], torch.tensor(expected), atol=1e-3, rtol=0)
