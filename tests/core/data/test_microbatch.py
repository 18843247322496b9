"""The plan of micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import plan_microbatches

lengths_strategy = st.lists(st.integers(0, 40), max_size=60)


@given(lengths_strategy, st.integers(1, 100), st.booleans())
def test_each_row_stands_in_one_microbatch_within_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    plan = plan_microbatches(lengths, budget, padded)
    assert sorted(row for group in plan for row in group) == list(range(len(lengths)))
    for group in plan:
        own = [lengths[row] for row in group]
        cost = len(own) * max(own) if padded else sum(own)
        assert cost <= budget or len(group) == 1


@given(lengths_strategy, st.integers(1, 100), st.booleans())
def test_the_number_of_microbatches_is_near_the_fewest(lengths: list[int], budget: int, padded: bool) -> None:
    """First fit decreasing needs at most 11/9 of the fewest, plus one; too long rows count for themselves."""
    plan = plan_microbatches(lengths, budget, padded)
    fits = [length for length in lengths if length <= budget]
    if not padded:
        fewest = -(-sum(fits) // budget)
        assert len(plan) <= len(lengths) - len(fits) + max(1, 2 * fewest)
    else:
        longest = max(fits, default=0)
        most = max(1, budget // longest) if longest else len(fits)
        assert len(plan) <= len(lengths) - len(fits) + (-(-len(fits) // most) if fits else 0)


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 100), st.booleans())
def test_rows_of_one_length_go_in_order_into_the_fewest_even_groups(rows, length, budget, padded) -> None:
    plan = plan_microbatches([length] * rows, budget, padded)
    assert [row for group in plan for row in group] == list(range(rows))
    most = max(1, budget // length) if length else max(1, rows)
    assert len(plan) == -(-rows // most)
    sizes = [len(group) for group in plan]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_rows_of_like_length_go_together() -> None:
    assert plan_microbatches([1, 8, 2, 9], max_tokens=18) == [[3, 1], [2, 0]]


def test_a_row_over_the_budget_goes_alone() -> None:
    assert plan_microbatches([3, 50, 3], max_tokens=10) == [[1], [0, 2]]
    assert plan_microbatches([3, 50, 3], max_tokens=10, padded=False) == [[1], [0, 2]]


def test_lengths_may_be_a_tensor() -> None:
    assert plan_microbatches(torch.tensor([3, 3, 3]), 6) == [[0, 1], [2]]


@pytest.mark.parametrize(("lengths", "budget", "message"), [([1], 0, "positive"), ([2, -1], 5, "row 1 is negative")])
def test_nonsense_is_refused(lengths: list[int], budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_microbatches(lengths, budget)
