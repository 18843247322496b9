"""Advantage estimators against their formulas, sample by sample."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch, Ragged
from enginehouse.errors import ConfigError
from enginehouse.roles.workers import TRAINED, fill_defaults
from enginehouse_rl.advantages.distillation import distillation
from enginehouse_rl.advantages.gdpo import gdpo
from enginehouse_rl.advantages.gpg import gpg
from enginehouse_rl.advantages.grpo import grpo
from enginehouse_rl.advantages.opo import opo
from enginehouse_rl.advantages.process_rewards import process_rewards
from enginehouse_rl.advantages.reinforce_plus_plus import reinforce_plus_plus
from enginehouse_rl.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from enginehouse_rl.advantages.rloo import rloo


def make_batch(rewards, groups):
    mask = Ragged.from_list([torch.tensor([False] + [True] * (1 + i % 3)) for i in range(len(rewards))])
    reward = torch.tensor(rewards, dtype=torch.float32)
    return Batch(
        {
            "reward": reward,
            "rewards": torch.stack([reward, reward.square()], dim=1),
            "group": torch.tensor(groups),
            "loss_mask": mask,
            "response_tokens": mask.lengths - 1,
            "token_rewards": mask.like(torch.zeros(mask.tokens)),
        }
    )


def per_row(batch):
    """Each row's advantage; checks that all its counted tokens have it and the others none."""
    result, batch = [], fill_defaults(batch)
    for row in range(len(batch)):
        mask, values = batch["loss_mask"][row], batch["advantages"][row]
        assert (values[~mask] == 0).all()
        assert (values[mask] == values[mask][0]).all()
        result.append(values[mask][0].item())
    return result


grouped = st.integers(1, 4).flatmap(
    lambda groups: st.lists(
        st.tuples(st.integers(0, groups - 1), st.sampled_from([0.0, 0.25, 1.0, -3.0])), min_size=1, max_size=24
    )
)


@given(grouped)
def test_grpo_is_the_distance_from_the_group_mean_in_standard_deviations(samples):
    groups, rewards = zip(*samples, strict=True)
    for row, advantage in enumerate(per_row(grpo(make_batch(rewards, groups)))):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == groups[row]]
        deviation = statistics.stdev(mates) if len(mates) > 1 else 0.0
        expected = (rewards[row] - statistics.mean(mates)) / (deviation + 1e-6)
        assert advantage == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(grouped)
def test_unscaled_grpo_is_the_distance_from_the_mean(samples):
    groups, rewards = zip(*samples, strict=True)
    for row, advantage in enumerate(per_row(grpo(make_batch(rewards, groups), scale=False))):
        mates = [r for r, g in zip(rewards, groups, strict=True) if g == groups[row]]
        assert advantage == pytest.approx(rewards[row] - statistics.mean(mates), abs=1e-5)


@given(grouped)
def test_rloo_is_the_distance_from_the_mean_of_the_others(samples):
    groups, rewards = zip(*samples, strict=True)
    for row, advantage in enumerate(per_row(rloo(make_batch(rewards, groups)))):
        others = [r for i, (r, g) in enumerate(samples_by_row(rewards, groups)) if g == groups[row] and i != row]
        expected = rewards[row] - statistics.mean(others) if others else 0.0
        assert advantage == pytest.approx(expected, abs=1e-5)


def samples_by_row(rewards, groups):
    return list(zip(rewards, groups, strict=True))


@given(
    st.sampled_from([0.7, 1.1, 3.3, 10.1, 100.1, -57.3]),
    st.integers(2, 16),
    st.integers(1, 3),
    st.sampled_from([grpo, rloo, opo, gpg, process_rewards]),
)
def test_a_group_of_equal_rewards_credits_nothing(reward, size, groups, advantage):
    rewards = [reward] * (size * groups) + [1.0, 2.0]  # the last group has something to learn from
    labels = [number % groups for number in range(size * groups)] + [groups, groups]
    found = per_row(advantage(make_batch(rewards, labels)))
    assert found[:-2] == [0.0] * (size * groups)
    assert found[-2] < 0 < found[-1]


@pytest.mark.parametrize("advantage", [grpo, rloo])
def test_a_masked_row_counts_in_its_group_and_is_credited_with_nothing(advantage):
    batch = make_batch([1.0, 0.0, 0.5], [0, 0, 0])
    mask = batch["loss_mask"]
    masked = fill_defaults(advantage(batch.with_columns(loss_mask=mask.like(mask.values & (mask.row != 1)))))
    whole = fill_defaults(advantage(batch))["advantages"]
    assert torch.equal(masked["advantages"].values, torch.where(mask.row != 1, whole.values, 0))


@given(st.sampled_from([100.1, -57.3, 1e4]), st.integers(2, 16))
def test_grpo_of_large_rewards_is_exact(offset, size):
    rewards = torch.tensor([offset + number / 8 for number in range(size)]).tolist()
    for reward, advantage in zip(rewards, per_row(grpo(make_batch(rewards, [0] * size))), strict=True):
        expected = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
        assert advantage == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_advantage_of_whole_or_double_numbers_is_as_precise_as_any_other():
    for dtype in (torch.int64, torch.float64):
        batch = make_batch([1.0, 0.0], [0, 0]).with_columns(advantages=torch.tensor([2, -1], dtype=dtype))
        assert fill_defaults(batch)["advantages"].values.dtype == torch.float32
        assert per_row(batch) == [2.0, -1.0]


@pytest.mark.parametrize("advantage", [reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo])
@pytest.mark.parametrize("reward", [0.7, 100.1, -57.3])
def test_a_step_of_equal_rewards_credits_nothing(advantage, reward):
    assert per_row(advantage(make_batch([reward] * 12, [0, 1, 2] * 4))) == [0.0] * 12


@pytest.mark.parametrize("reward", [0.7, 100.1, -57.3])
def test_a_reward_that_is_equal_in_its_group_says_nothing_beside_others(reward):
    batch = make_batch([1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1])
    alone = gdpo(batch.with_columns(rewards=batch["rewards"][:, :1]))
    beside = gdpo(batch.with_columns(rewards=torch.stack([batch["reward"], torch.full((4,), reward)], dim=1)))
    assert torch.equal(beside["advantages"], alone["advantages"])


def test_as_many_weights_as_rewards():
    with pytest.raises(ConfigError, match="one weight for each reward, 2 in all, not 3"):
        gdpo(make_batch([1.0, 0.0], [0, 0]), weights=(1.0, 1.0, 1.0))


def test_gpg_makes_up_for_groups_that_tell_nothing():
    """Four of six samples are of groups with a gradient: what they are credited with is 6/4 of the distance."""
    batch = make_batch([1.0, 1.0, 0.0, 2.0, 5.0, 3.0], [0, 0, 1, 1, 2, 2])
    assert per_row(gpg(batch)) == [0.0, 0.0, -1.5, 1.5, 1.5, -1.5]


def test_process_rewards_sum_the_steps_that_end_later_each_among_its_groups_steps():
    mask = Ragged.from_list([[False, True, True, True], [False, True, False, True, True]])
    steps = mask.like(torch.tensor([9.0, 0.0, 0.5, 0.0, 9.0, 1.0, 9.0, -1.0, 0.0]))  # of tokens that do not count: 9
    batch = Batch(
        {"reward": torch.tensor([1.0, 0.0]), "group": torch.tensor([3, 3]), "loss_mask": mask, "token_rewards": steps}
    )
    scores = [0.5, 1.0, 1.0, -1.0, 0.0]  # the row's own reward ends it, even if it is 0
    mean, deviation = statistics.mean(scores), statistics.stdev(scores)
    half, one, good, bad, none = [(score - mean) / deviation for score in scores]
    expected = [0, half + one, half + one, one, 0, good + bad + none, 0, bad + none, none]
    assert process_rewards(batch)["advantages"].values.tolist() == pytest.approx(expected, abs=1e-5)


@given(grouped)
def test_process_rewards_without_any_are_grpo(samples):
    groups, rewards = zip(*samples, strict=True)
    batch = make_batch(rewards, groups)
    assert per_row(process_rewards(batch)) == pytest.approx(per_row(grpo(batch)), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("gamma", "expected"), [(0.0, [0, 1, 0, -2, 4]), (0.5, [0, 1, 0, 0, 4])])
def test_distillation_credits_a_token_with_how_much_likelier_the_teacher_finds_it_and_those_after_it(gamma, expected):
    mask = Ragged.from_list([[False, True, False, True, True]])
    batch = Batch(
        {
            "loss_mask": mask,
            "old_logprobs": mask.like(torch.tensor([0.0, -2, 7, -2, -2])),
            "reference_logprobs": mask.like(torch.tensor([0.0, -1, 0, -4, 2])),
        }
    )
    assert distillation(batch, gamma=gamma)["advantages"].values.tolist() == expected


def with_penalty(advantage, rewards, penalties, groups):
    """The credit of each row, of three tokens, with a KL term in the reward that costs `penalties`."""
    mask = Ragged.from_list([[True] * 3] * len(rewards), dtype=torch.bool)
    columns = {"reward": torch.tensor(rewards), "kl_penalty": torch.tensor(penalties), "group": torch.tensor(groups)}
    batch = Batch({**columns, "loss_mask": mask, "token_rewards": mask.like(torch.zeros(mask.tokens))})
    made = fill_defaults(advantage(batch))["advantages"].values
    assert (made.view(-1, 3) == made.view(-1, 3)[:, :1]).all()
    return made.view(-1, 3)[:, 0]


DIVIDE = (grpo, gpg, process_rewards, reinforce_plus_plus_baseline)
"""Advantages that divide by a deviation, or by how many groups differ."""


@pytest.mark.parametrize("advantage", DIVIDE)
@pytest.mark.parametrize("coefficient", [1e-6, 1e-4, 1e-2])
def test_in_a_group_of_equal_rewards_a_kl_term_counts_by_its_coefficient(advantage, coefficient):
    divergences = torch.tensor([0.5, 1.5, 4.0])
    credits = with_penalty(advantage, [0.7] * 3, (coefficient * divergences).tolist(), [0] * 3)
    torch.testing.assert_close(credits, coefficient * (divergences.mean() - divergences))


@pytest.mark.parametrize("advantage", DIVIDE)
def test_a_kl_term_is_taken_off_the_credit_and_leaves_the_rewards_deviation_alone(advantage):
    rewards, penalties, groups = [0.0, 1.0, 1.0, 0.2, 0.2], [0.1, 0.3, 0.2, 0.0, 0.4], [0, 0, 0, 1, 1]
    without = with_penalty(advantage, rewards, [0.0] * 5, groups)
    paid = without - with_penalty(advantage, rewards, penalties, groups)
    torch.testing.assert_close(paid, torch.tensor([-0.1, 0.1, 0.0, -0.2, 0.2]), atol=1e-6, rtol=1e-5)


def test_no_token_counts_of_a_row_that_is_not_trained_on():
    mask = Ragged.from_list([[False, True], [False, True, True], [True]], dtype=torch.bool)
    batch = fill_defaults(Batch({"loss_mask": mask, TRAINED: torch.tensor([True, False, True])}))
    assert batch["loss_mask"].values.tolist() == [False, True, False, False, False, True]
    assert TRAINED not in batch
