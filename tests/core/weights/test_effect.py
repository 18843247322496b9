"""The rule by which a dropped update is told from rounding, on made-up logprobs."""

import numpy as np
import pytest

from enginehouse.weights.effect import CLEARLY, WHOLE, Scores, mean_difference, share_shown, share_taken, stands_still

TOKENS = 60


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def scores(draw, true, apart, noise, replica=None):
    """The two engines' logprobs of weights whose true logprobs are given; `apart` is the same at any weights."""

    def rounded(logprobs):
        return logprobs + noise * draw.standard_normal(TOKENS)

    return Scores(rounded(true), rounded(true if replica is None else replica) + apart)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 0.1, 10.0])
def test_a_replica_is_judged_right_or_not_at_all_whatever_the_size_of_rounding(draw, taken, size):
    """Both engines round differently at other weights, and a replica that dropped an update also each time anew."""
    judged = 0
    for _ in range(300):
        old, apart = draw.standard_normal(TOKENS), 0.3 * size * draw.standard_normal(TOKENS)
        change = draw.uniform(0, 12) * size * draw.standard_normal(TOKENS)
        before = scores(draw, old, apart, size)
        after = scores(draw, old + change, apart, size, old + change if taken else old)
        share = share_taken(before, after, rounding=0.0)
        if share is not None:
            assert (share >= 0.5) == taken
            judged += 1
    assert judged > 50


@pytest.mark.parametrize("part", [0.6, 0.8, 1.0])
@pytest.mark.parametrize("noise", [1e-9, 1e-3, 1e-1])
def test_a_part_of_an_update_is_told_from_all_of_it_and_rounding_from_a_part(draw, part, noise):
    shown = []
    for _ in range(300):
        old, change = draw.standard_normal(TOKENS), draw.uniform(0, 12) * 0.1 * draw.standard_normal(TOKENS)
        before = scores(draw, old, 0.0, noise)
        after = scores(draw, old + change, 0.0, noise, old + part * change)
        if share_taken(before, after, rounding=0.0) is not None:
            shown.append(share_shown(before, after, rounding=0.0))
    assert len(shown) > 50
    assert (min(shown) < WHOLE) == (part < 1)


def test_what_sets_the_engines_apart_at_any_weights_is_not_taken_for_a_dropped_update(draw):
    old, apart = draw.standard_normal(TOKENS), 1e-3 * draw.standard_normal(TOKENS)
    change = 10e-3 * draw.standard_normal(TOKENS)
    assert share_taken(Scores(old, old + apart), Scores(old + change, old + change + apart), 0.0) == 1.0


def test_one_token_that_went_to_another_expert_decides_nothing(draw):
    old = draw.standard_normal(TOKENS)
    change = 1e-2 * draw.standard_normal(TOKENS)
    elsewhere = np.zeros(TOKENS)
    elsewhere[7] = -30.0 * np.sign(change[7])
    followed = change + elsewhere
    assert followed @ change < 0.5 * change @ change  # the projection would be misled
    assert share_taken(Scores(old, old), Scores(old + change, old + followed), 1e-7) > 0.9


def test_logprobs_that_are_the_same_to_the_last_bit_need_no_wait(draw):
    old, tiny = draw.standard_normal(TOKENS), np.full(TOKENS, 1e-9)
    apart = Scores(old, old + 0.1)
    assert stands_still(apart, Scores(old + tiny, old + 0.1))
    assert not stands_still(apart, Scores(old + tiny, old + tiny + 0.1))
    few = np.where(np.arange(TOKENS) < TOKENS // 3, 1e-9, 0.0)  # too little has changed to expect it of the replica
    assert not stands_still(apart, Scores(old + few, old + 0.1))
    assert not stands_still(apart, apart)


def test_rounding_is_taken_for_no_less_than_the_dtypes_epsilon(draw):
    old = draw.standard_normal(TOKENS)
    nudged = old + np.where(np.arange(TOKENS) == 0, 1e-5, 0.0)
    for rounding, judged in ((1e-3, False), (1e-3 / CLEARLY / 2, True)):
        after = Scores(old + 1e-3, nudged)
        assert (share_taken(Scores(old, old), after, rounding) is not None) == judged


def test_rows_of_other_lengths_have_no_difference():
    assert mean_difference([[0.0, 1.0], [0.0, 2.0, 3.0]], [[9.0, 1.5], [9.0, 2.0, 3.0]]) == pytest.approx(0.5 / 3)
    assert np.isnan(mean_difference([[0.0, 1.0]], [[0.0, 1.0, 2.0]]))
