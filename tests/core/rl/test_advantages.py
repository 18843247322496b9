"""Advantage estimators against their formulas, sample by sample."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch, Ragged
from enginehouse.rl.advantages.grpo import grpo
from enginehouse.rl.advantages.rloo import rloo


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
    result = []
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
