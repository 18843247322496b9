"""Advantage estimators against their formulas, sample by sample."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch, Ragged
from enginehouse.rl.advantages.grpo import grpo
from enginehouse.rl.advantages.rloo import rloo
from enginehouse.rl.roles import with_defaults


def make_batch(rewards, groups):
    masks = [[False] + [True] * (1 + i % 3) for i in range(len(rewards))]
    return Batch(
        {
            "reward": torch.tensor(rewards, dtype=torch.float32),
            "group": torch.tensor(groups),
            "loss_mask": Ragged.from_list([torch.tensor(mask) for mask in masks]),
        }
    )


def per_row(batch):
    """Each row's advantage; checks that all its counted tokens have it and the others none."""
    result, batch = [], with_defaults(batch)
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
    st.sampled_from([grpo, rloo]),
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
    masked = with_defaults(advantage(batch.with_columns(loss_mask=mask.like(mask.values & (mask.row != 1)))))
    whole = with_defaults(advantage(batch))["advantages"]
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
        assert with_defaults(batch)["advantages"].values.dtype == torch.float32
        assert per_row(batch) == [2.0, -1.0]
