"""The order of rows over steps and epochs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch, Sampler
from enginehouse.errors import DataError


class Numbers:
    """The rows are their own numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: np.ndarray) -> Batch:
        return Batch({"row": torch.from_numpy(indices)})


def draw(sampler: Sampler, steps: int) -> list[int]:
    return [row for _ in range(steps) for row in sampler.next()["row"].tolist()]


@given(st.integers(1, 20), st.integers(1, 25), st.integers(-5, 5))
def test_each_epoch_holds_each_row_once_across_step_boundaries(rows: int, per_step: int, seed: int) -> None:
    drawn = draw(Sampler(Numbers(rows), per_step, seed), steps=3 * rows)
    for start in range(0, len(drawn) - rows + 1, rows):
        assert sorted(drawn[start : start + rows]) == list(range(rows))


@given(st.integers(1, 20), st.integers(1, 25), st.integers(0, 9), st.integers(0, 2**40))
def test_a_resumed_sampler_goes_on_exactly(rows: int, per_step: int, before: int, seed: int) -> None:
    sampler = Sampler(Numbers(rows), per_step, seed)
    draw(sampler, before)
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = Sampler(Numbers(rows), per_step, seed=123)
    resumed.load_state_dict(state)
    assert draw(resumed, 5) == draw(sampler, 5)


def test_epochs_and_seeds_differ() -> None:
    drawn = draw(Sampler(Numbers(50), 50, seed=0), 2)
    assert drawn[:50] != drawn[50:]
    assert drawn[:50] != draw(Sampler(Numbers(50), 50, seed=1), 1)
    assert drawn == draw(Sampler(Numbers(50), 50, seed=0), 2)


def test_a_data_set_of_another_size_cannot_be_resumed() -> None:
    state = Sampler(Numbers(5), 2).state_dict()
    with pytest.raises(DataError, match="5 rows, this one has 6"):
        Sampler(Numbers(6), 2).load_state_dict(state)


@pytest.mark.parametrize(("rows", "per_step"), [(0, 1), (3, 0)])
def test_drawing_nothing_is_refused(rows: int, per_step: int) -> None:
    with pytest.raises(ValueError, match="rows a step"):
        Sampler(Numbers(rows), per_step)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"position": -1}, "the sampler's position is -1"),
        ({"position": 6}, "the sampler's position is 6, in 5 rows"),
        ({"position": "2"}, "the sampler's position is '2'"),
        ({"position": 2.0}, "the sampler's position is 2.0"),
        ({"epoch": True}, "the sampler's epoch is True"),
        ({"seed": None}, "the sampler's seed is None"),
    ],
)
def test_a_state_that_is_damaged_is_an_error_that_names_it(changed: dict, said: str) -> None:
    sampler = Sampler(Numbers(5), 2)
    with pytest.raises(DataError, match=said):
        sampler.load_state_dict(sampler.state_dict() | changed)
    with pytest.raises(DataError, match="the sampler's seed is None"):
        sampler.load_state_dict({})


def test_a_state_taken_at_the_end_of_an_epoch_goes_on() -> None:
    sampler = Sampler(Numbers(4), 2)
    draw(sampler, 2)
    state = sampler.state_dict()
    for same in (state, {**state, "epoch": 0, "position": 4}):  # as it was written once
        sampler.load_state_dict(same)
        assert sampler.drawn == 4
        assert sorted(draw(sampler, 2)) == [0, 1, 2, 3]
