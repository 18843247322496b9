"""Rows end to end: every needed token is predicted from the token before it, whatever the cut and the padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse_megatron.packing import make_padding, plan
from enginehouse_torch.modeling.packing import BatchRows

MASKS = st.lists(st.lists(st.booleans(), max_size=9), max_size=8)


def rows_of(masks):
    offsets = np.cumsum([0, *(len(mask) for mask in masks)])
    flat = np.array([one for mask in masks for one in mask], dtype=bool)
    return offsets, BatchRows.from_offsets(offsets, flat)


@given(MASKS, st.integers(1, 30), st.sampled_from([(1, 1), (1, 2), (4, 4), (4, 8)]))
def test_a_batch_is_cut_without_losing_or_repeating_a_token(masks, budget, multiples):
    each, whole = multiples
    offsets, rows = rows_of(masks)
    parts = plan(rows, budget, each=each, whole=whole)
    expected = [
        offsets[row] + place for row, mask in enumerate(masks) for place, need in enumerate(mask) if need and place
    ]
    assert sorted(int(token) for part in parts for token in part.needed) == expected
    assert sorted(int(row) for part in parts for row in part.rows) == list(range(len(masks)))
    for part in parts:
        before = part.tokens[part.predictor]
        assert (before == part.needed - 1).all(), "a token is predicted from the one before it"
        assert sum(part.lengths) == len(part.tokens)
        assert sum(part.lengths) % whole == 0
        assert all(length % each == 0 for length in part.lengths)
        _assert_rows_are_whole(part, offsets)


def _assert_rows_are_whole(part, offsets):
    """Each sequence is the beginning of one row, then padding."""
    at = 0
    for length in part.lengths:
        own = part.tokens[at : at + length]
        at += length
        real = own[own >= 0]
        assert (own[len(real) :] == -1).all()
        if len(real):
            assert real[0] in offsets
            assert (np.diff(real) == 1).all()


@given(MASKS, st.integers(10, 30))
def test_a_micro_batch_stays_within_the_budget(masks, budget):
    _, rows = rows_of(masks)
    for part in plan(rows, budget, each=1, whole=1):
        assert len(part.tokens) <= budget


def test_a_batch_of_which_nothing_is_needed_is_one_micro_batch_of_padding():
    _, rows = rows_of([[False, False], []])
    (part,) = plan(rows, 16, each=1, whole=2)
    assert part.rows.tolist() == [0, 1], "the loss may count rows without tokens"
    assert part.tokens.tolist() == [-1, -1]
    assert len(part.needed) == 0


@pytest.mark.parametrize("whole", [1, 4])
def test_a_pass_for_other_ranks_sake_has_no_rows(whole):
    part = make_padding(whole)
    assert part.rows is None
    assert part.tokens.tolist() == [-1] * whole
