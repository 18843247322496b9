"""GAE against its sum, written out token by token, on rows of several turns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch, Ragged
from enginehouse.rl.advantages.gae import gae

rows = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=6)


def make_batch(masks, seed=0):
    """Random numbers everywhere, also at tokens that are no states: nothing may come of those."""
    generator = torch.Generator().manual_seed(seed)
    mask = Ragged.from_list([torch.tensor(mask, dtype=torch.bool) for mask in masks])
    drawn = {name: mask.like(torch.randn(mask.tokens, generator=generator)) for name in ("token_rewards", "values")}
    return Batch({"reward": torch.randn(len(masks), generator=generator), "loss_mask": mask, **drawn})


def by_hand(batch, gamma, lam):
    """Each row's (position, advantage, return) by the paper's sums."""
    for row in range(len(batch)):
        states = batch["loss_mask"][row].nonzero().flatten().tolist()
        values = [batch["values"][row][t].item() for t in states] + [0.0]
        rewards = [batch["token_rewards"][row][t].item() for t in states]
        if states:
            rewards[-1] += batch["reward"][row].item()
        errors = [r + gamma * values[i + 1] - values[i] for i, r in enumerate(rewards)]
        for i, t in enumerate(states):
            advantage = sum((gamma * lam) ** k * error for k, error in enumerate(errors[i:]))
            yield row, t, advantage, advantage + values[i]


@pytest.mark.slow
@given(rows, st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_discounted_sum_of_the_critics_errors_over_counted_tokens(masks, gamma, lam):
    batch = make_batch(masks)
    made = gae(batch, gamma=gamma, lam=lam, normalize=False)
    expected = {(row, t): (advantage, value) for row, t, advantage, value in by_hand(batch, gamma, lam)}
    for row, mask in enumerate(masks):
        for t in range(len(mask)):
            found = made["advantages"][row][t].item(), made["returns"][row][t].item()
            assert found == pytest.approx(expected.get((row, t), (0.0, 0.0)), rel=1e-5, abs=1e-5)


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
