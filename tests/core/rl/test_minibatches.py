"""Mini-batches are dealt evenly, anew each pass, and from the seed alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.rl.minibatches import assign_minibatches


@given(st.integers(0, 50), st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**40))
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
