"""The order of rows over steps and epochs."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.data import Batch
from enginehouse.errors import DataError
from enginehouse_rl.data.sampler import Sampler
from enginehouse_rl.data.sources import Source


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
    with pytest.raises(DataError, match="5 rows, but this data set has 6 rows"):
        Sampler(Numbers(6), 2).load_state_dict(state)


@pytest.mark.parametrize(("rows", "per_step"), [(0, 1), (3, 0)])
def test_drawing_nothing_is_refused(rows: int, per_step: int) -> None:
    with pytest.raises(ValueError, match="rows a step"):
        Sampler(Numbers(rows), per_step)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"position": -1}, "the sampler's position must be a whole number, 0 or more, not -1"),
        ({"position": 6}, "the sampler's position must be at most 5, the number of rows, not 6"),
        ({"position": "2"}, "the sampler's position must be a whole number, 0 or more, not '2'"),
        ({"position": 2.0}, "the sampler's position must be a whole number, 0 or more, not 2.0"),
        ({"epoch": True}, "the sampler's epoch must be a whole number, 0 or more, not True"),
        ({"seed": None}, "the sampler's seed must be a whole number, not None"),
    ],
)
def test_a_state_that_is_damaged_is_an_error_that_names_it(changed: dict, said: str) -> None:
    sampler = Sampler(Numbers(5), 2)
    with pytest.raises(DataError, match=said):
        sampler.load_state_dict(sampler.state_dict() | changed)
    with pytest.raises(DataError, match="the sampler's seed must be a whole number, not None"):
        sampler.load_state_dict({})


def test_a_state_taken_at_the_end_of_an_epoch_goes_on() -> None:
    sampler = Sampler(Numbers(4), 2)
    draw(sampler, 2)
    state = sampler.state_dict()
    for same in (state, {**state, "epoch": 0, "position": 4}):  # as it was written once
        sampler.load_state_dict(same)
        assert sampler.drawn == 4
        assert sorted(draw(sampler, 2)) == [0, 1, 2, 3]


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@st.composite
def several(draw: st.DrawFn) -> dict:
    """Arguments of a sampler of several sources, with ranks or without."""
    sizes = draw(SIZES)
    sources = [Source(f"s{n}", f"s{n}.jsonl", rows, draw(st.floats(0.01, 100))) for n, rows in enumerate(sizes)]
    ranks = draw(st.none() | st.lists(st.integers(0, 3), min_size=sum(sizes), max_size=sum(sizes)))
    return {"dataset": Numbers(sum(sizes)), "sources": sources, "ranks": ranks}


@given(several(), st.integers(1, 9), st.integers(0, 2**40), st.integers(1, 300))
def test_each_epoch_of_each_source_holds_each_of_its_rows_once_and_in_order(given, per_step, seed, steps) -> None:
    sampler = Sampler(**given, rows_per_step=per_step, seed=seed)
    drawn = draw(sampler, steps)
    start = 0
    for source in given["sources"]:
        own = [row for row in drawn if start <= row < start + source.rows]
        for first in range(0, len(own) - source.rows + 1, source.rows):
            epoch = own[first : first + source.rows]
            assert sorted(epoch) == list(range(start, start + source.rows))
            if given["ranks"]:
                assert [given["ranks"][row] for row in epoch] == sorted(given["ranks"][row] for row in epoch)
        share = source.weight / sum(one.weight for one in given["sources"])
        assert abs(len(own) - share * len(drawn)) < 8
        assert sampler.epochs()[source.name] == pytest.approx(len(own) / source.rows)
        start += source.rows


@pytest.mark.slow
@given(several(), st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 99), st.integers(0, 99))
def test_a_cut_and_resumed_order_is_the_straight_one(given, per_step, seed, before, after) -> None:
    straight = draw(Sampler(**given, rows_per_step=per_step, seed=seed), before + after)
    cut = Sampler(**given, rows_per_step=per_step, seed=seed)
    first = draw(cut, before)
    resumed = Sampler(**given, rows_per_step=per_step, seed=123)
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    assert first + draw(resumed, after) == straight
    again = list(range(len(straight)))[::-1]  # any serial number, in any order: as after a resume with staleness
    assert resumed.rows(again)["row"].tolist() == straight[::-1]


def test_a_run_of_many_steps_is_resumed_across_the_parts_that_serial_numbers_are_counted_in() -> None:
    given = {"dataset": Numbers(7), "sources": [Source("a", "a", 5, 3.0), Source("b", "b", 2, 1.0)]}
    straight = Sampler(**given, rows_per_step=5000)
    drawn = draw(straight, 3)
    resumed = Sampler(**given, rows_per_step=1)
    resumed.load_state_dict({**straight.state_dict(), "epoch": 0, "position": 6})
    assert draw(resumed, 9000) == drawn[6:9006]
    assert straight.epochs() == {"a": pytest.approx(15000 * 0.75 / 5, abs=2), "b": pytest.approx(15000 / 8, abs=2)}


def test_equal_values_are_shuffled_anew_each_epoch() -> None:
    sampler = Sampler(Numbers(40), 20, ranks=[0] * 20 + [1] * 20)
    easy, hard, easy_again = (draw(sampler, 1) for _ in range(3))
    assert sorted(easy) == sorted(easy_again) == list(range(20))
    assert sorted(hard) == list(range(20, 40))
    assert easy != easy_again


def test_other_sources_or_in_another_order_cannot_be_resumed() -> None:
    def sampler(**sizes: int) -> Sampler:
        return Sampler(Numbers(sum(sizes.values())), 2, sources=[Source(*one, 1) for one in of(sizes)])

    def of(sizes: dict[str, int]) -> list[tuple[str, str, int]]:
        return [(name, f"{name}.jsonl", rows) for name, rows in sizes.items()]

    state = json.loads(json.dumps(sampler(a=2, b=3).state_dict()))
    sampler(a=2, b=3).load_state_dict(state)
    for others in ({"a": 3, "b": 2}, {"b": 2, "a": 3}, {"b": 3, "a": 2}):
        with pytest.raises(DataError, match=r"written with the files \[\['a', 2\], \['b', 3\]\] of data.train"):
            sampler(**others).load_state_dict(state)
    with pytest.raises(DataError, match="written with the files None of"):
        sampler(a=2, b=3).load_state_dict(sampler(a=5).state_dict())
    with pytest.raises(ValueError, match=r"the sources have \[5, 0\] rows"):
        sampler(a=5, b=0)


def test_sources_of_one_size_are_shuffled_each_by_itself() -> None:
    sampler = Sampler(Numbers(40), 60, sources=[Source("a", "", 20, 1), Source("b", "", 20, 1)])
    drawn = draw(sampler, 1)
    one, two = [row for row in drawn if row < 20][:20], [row - 20 for row in drawn if row >= 20][:20]
    assert sorted(one) == sorted(two) == list(range(20))
    assert one != two
