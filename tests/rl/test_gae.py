"""What GAE does at edges; that its numbers are right, `test_oracles.py` shows on rows of several turns."""

import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse_rl.advantages.gae import gae


def make_batch(masks, seed=0):
    """Random numbers everywhere, also at tokens that are no states: nothing may come of those."""
    generator = torch.Generator().manual_seed(seed)
    mask = Ragged.from_list([torch.tensor(mask, dtype=torch.bool) for mask in masks])
    drawn = {name: mask.like(torch.randn(mask.tokens, generator=generator)) for name in ("token_rewards", "values")}
    return Batch({"reward": torch.randn(len(masks), generator=generator), "loss_mask": mask, **drawn})


def test_normalized_advantages_have_mean_0_and_deviation_1_over_the_step_and_returns_stay():
    batch = make_batch([[False, True, True, False, True], [True, True], [False]])
    plain, scaled = gae(batch, normalize=False), gae(batch)
    counted = batch["loss_mask"].values
    advantages = scaled["advantages"].values[counted]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std().item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(advantages.argsort(), plain["advantages"].values[counted].argsort())
    assert not scaled["advantages"].values[~counted].any()
    assert torch.equal(scaled["returns"].values, plain["returns"].values)


def test_the_last_counted_tokens_earn_the_reward_whatever_follows_them():
    mask = Ragged.from_list([[False, True, False]])
    zeros = mask.like(torch.zeros(3))
    batch = Batch({"reward": torch.tensor([2.0]), "loss_mask": mask, "token_rewards": zeros, "values": zeros})
    assert gae(batch, normalize=False)["advantages"].values.tolist() == [0.0, 2.0, 0.0]


@pytest.mark.parametrize("masks", [[], [[]], [[False, False]], [[True]]])
def test_a_step_with_too_few_states_to_compare_credits_nothing(masks):
    made = gae(make_batch(masks) if masks else make_batch([[]]).slice(0, 0))
    assert made["advantages"].values.tolist() == [0.0] * sum(map(len, masks))
