"""Dealing rows to parts by their lengths."""

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from enginehouse.data import balance

parts_strategy = st.integers(1, 9)
lengths_strategy = st.one_of(
    st.lists(st.integers(0, 40), max_size=60),
    st.lists(st.sampled_from([0, 1, 8192]), max_size=60),
    st.lists(st.integers(0, 2**40), max_size=20),
)


def sums(lengths: list[int], plan: list[np.ndarray]) -> list[int]:
    return [sum(lengths[row] for row in part.tolist()) for part in plan]


def fullest_of_the_greedy_deal(lengths: list[int], parts: int) -> int:
    """The oracle: longest row first, each to the emptiest part."""
    filled = [0] * parts
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(filled, filled[0] + length)
    return max(filled)


def fullest_of_the_best_deal(lengths: list[int], parts: int) -> int:
    """The oracle: every deal is tried."""
    deals = itertools.product(range(parts), repeat=len(lengths))
    return min(
        max(sum(itertools.compress(lengths, (of == part for of in deal))) for part in range(parts)) for deal in deals
    )


@given(lengths_strategy, parts_strategy)
def test_each_row_stands_in_exactly_one_part(lengths: list[int], parts: int) -> None:
    plan = balance(lengths, parts)
    assert len(plan) == parts
    assert sorted(row for part in plan for row in part.tolist()) == list(range(len(lengths)))
    for part in plan:
        assert part.dtype == np.int64
        assert part.tolist() == sorted(part.tolist())


@given(lengths_strategy, parts_strategy)
def test_sums_differ_by_at_most_the_longest_row(lengths: list[int], parts: int) -> None:
    dealt = sums(lengths, balance(lengths, parts))
    assert max(dealt) - min(dealt) <= max(lengths, default=0)


@given(lengths_strategy, parts_strategy)
@example([2, 3, 6, 6, 8, 11, 12, 14], 3)  # where differencing alone is a token worse
def test_the_fullest_part_is_no_fuller_than_the_greedy_deal_makes_it(lengths: list[int], parts: int) -> None:
    assert max(sums(lengths, balance(lengths, parts))) <= fullest_of_the_greedy_deal(lengths, parts)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.integers(0, 30), max_size=7), st.integers(1, 4))
def test_the_fullest_part_is_within_the_bound_of_the_best_deal(lengths: list[int], parts: int) -> None:
    """Graham's bound: at most `4/3 - 1/(3 parts)` of the best."""
    fullest = max(sums(lengths, balance(lengths, parts)))
    assert 3 * parts * fullest <= (4 * parts - 1) * fullest_of_the_best_deal(lengths, parts)


@given(lengths_strategy, parts_strategy)
def test_parts_are_in_the_order_of_their_first_rows_and_empty_only_for_want_of_rows(lengths, parts) -> None:
    plan = balance(lengths, parts)
    with_rows = min(len(lengths), parts)
    assert [len(part) > 0 for part in plan] == [True] * with_rows + [False] * (parts - with_rows)
    firsts = [int(part[0]) for part in plan[:with_rows]]
    assert firsts == sorted(firsts)


@given(st.integers(0, 50), st.integers(0, 9), parts_strategy)
def test_rows_of_one_length_are_dealt_in_consecutive_runs(rows: int, length: int, parts: int) -> None:
    plan = balance([length] * rows, parts)
    assert [row for part in plan for row in part.tolist()] == list(range(rows))
    sizes = [len(part) for part in plan]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 9), st.integers(0, 30), parts_strategy)
def test_rows_without_a_token_are_spread_over_parts_that_are_as_full(length: int, empty: int, parts: int) -> None:
    plan = balance([length] * parts + [0] * empty, parts)
    sizes = [len(part) for part in plan]
    assert max(sizes) - min(sizes) <= 1


@given(lengths_strategy, parts_strategy)
def test_the_plan_depends_on_the_lengths_alone(lengths: list[int], parts: int) -> None:
    wanted = [part.tolist() for part in balance(lengths, parts)]
    for same in (tuple(lengths), np.array(lengths, dtype=np.int64), torch.tensor(lengths, dtype=torch.int64)):
        assert [part.tolist() for part in balance(same, parts)] == wanted


def test_differencing_finds_what_the_greedy_deal_misses() -> None:
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, balance(lengths, 2))) == [14, 16]
    assert fullest_of_the_greedy_deal(lengths, 2) == 17


def test_answers_of_a_large_step_are_dealt_to_a_token() -> None:
    """256 prompts x 16 samples whose lengths are as spread as answers' are, to 16 replicas."""
    drawn = np.random.default_rng(0).lognormal(6.5, 1.0, 4096)
    lengths = np.minimum(drawn, 8192).astype(np.int64).tolist()
    dealt = sums(lengths, balance(lengths, 16))
    assert max(dealt) - min(dealt) <= 1


@pytest.mark.parametrize(
    ("lengths", "parts", "message"),
    [
        ([1], 0, "0 parts"),
        ([2, -1], 2, "row 1 is negative"),
        ([0.5, 1.0], 2, "one-dimensional integers, not float64"),
        ([[1, 2]], 2, r"one-dimensional integers, not int64 of shape \(1, 2\)"),
    ],
)
def test_nonsense_is_refused(lengths: list, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(lengths, parts)
