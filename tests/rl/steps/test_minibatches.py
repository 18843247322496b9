"""Mini-batches are dealt evenly, anew each pass, and from the seed alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.fleet.generation import row_seeds
from enginehouse_rl.episodes.sampling import make_step_seed
from enginehouse_rl.steps.minibatches import assign_minibatches


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_each_pass_deals_every_row_once_and_evenly(rows, minibatches, epochs, seed):
    dealt = assign_minibatches(rows, minibatches, epochs, seed)
    assert dealt.shape == (rows, epochs)
    for epoch in range(epochs):
        sizes = torch.bincount(dealt[:, epoch], minlength=minibatches)
        assert len(sizes) == minibatches
        assert sizes.max() - sizes.min() <= 1
    assert torch.equal(dealt, assign_minibatches(rows, minibatches, epochs, seed))


def test_passes_and_seeds_differ():
    dealt = assign_minibatches(64, 4, 2, seed=0)
    assert not torch.equal(dealt[:, 0], dealt[:, 1])
    assert not torch.equal(dealt, assign_minibatches(64, 4, 2, seed=1))


SEEDS = (0, 1, 12345, 2**32, 2**32 + 1, 2**63 - 1)


def test_each_seed_of_a_run_deals_otherwise_in_each_step():
    deals = [assign_minibatches(64, 4, 1, make_step_seed(seed, step)) for seed in SEEDS for step in (1, 2)]
    assert len({tuple(deal.flatten().tolist()) for deal in deals}) == 2 * len(SEEDS)


def test_each_seed_of_a_run_draws_otherwise_in_each_step():
    draws = [tuple(row_seeds(make_step_seed(seed, step), np.arange(4))) for seed in SEEDS for step in (1, 2, 2**31 + 1)]
    assert len(set(draws)) == 3 * len(SEEDS)
    assert all(0 <= one < 2**31 for draw in draws for one in draw)
