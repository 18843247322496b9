"""Every operation of `Batch` against a model that cannot be wrong: a plain list of rows."""

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.data import Batch, Ragged

Row = dict[str, Any]

tokens = st.lists(st.integers(-(2**62), 2**62), max_size=5)
row_strategy = st.fixed_dictionaries(
    {
        "ids": tokens,
        "score": st.integers(-1000, 1000),
        "vector": st.lists(st.booleans(), min_size=3, max_size=3),
        "note": st.one_of(st.none(), st.text(max_size=3), st.dictionaries(st.text(max_size=2), st.integers())),
    }
)
rows_strategy = st.lists(row_strategy, max_size=8)


def build(rows: list[Row]) -> Batch:
    ids = Ragged.from_list([row["ids"] for row in rows])
    return Batch(
        {
            "ids": ids,
            "half": ids.like((ids.values % 97).to(torch.bfloat16)),
            "score": torch.tensor([row["score"] for row in rows], dtype=torch.int32),
            "vector": torch.tensor([row["vector"] for row in rows], dtype=torch.bool).reshape(len(rows), 3),
            "note": [row["note"] for row in rows],
        }
    )


def rows_of(batch: Batch) -> list[Row]:
    """Read a batch back through its public face, and hold that it is well formed on the way."""
    Ragged(batch["ids"].values, batch["ids"].offsets)
    assert batch["half"].offsets is batch["ids"].offsets, "columns made alike stopped sharing their offsets"
    rows = []
    for index in range(len(batch)):
        row = batch.row(index)
        assert row.pop("half").tolist() == (row["ids"] % 97).to(torch.bfloat16).tolist()
        rows.append({name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in row.items()})
    return rows


@given(rows_strategy)
def test_a_batch_holds_its_rows(rows: list[Row]) -> None:
    batch = build(rows)
    assert len(batch) == len(rows)
    assert rows_of(batch) == rows
    assert batch.lengths("ids").tolist() == [len(row["ids"]) for row in rows]


@given(rows_strategy, st.integers(-10, 10), st.one_of(st.none(), st.integers(-10, 10)))
def test_slice_is_a_list_slice(rows: list[Row], start: int, stop: int | None) -> None:
    assert rows_of(build(rows).slice(start, stop)) == rows[start:stop]


@given(rows_strategy, st.data())
def test_take_picks_rows_in_order_with_repeats(rows: list[Row], data: st.DataObject) -> None:
    bound = len(rows)
    picks = data.draw(st.lists(st.integers(-bound, bound - 1), max_size=12)) if rows else []
    expected = [rows[pick] for pick in picks]
    for form in (picks, torch.tensor(picks, dtype=torch.int64), np.array(picks, dtype=np.int32)):
        assert rows_of(build(rows).take(form)) == expected


@given(rows_strategy, st.data())
def test_a_mask_takes_the_rows_where_it_is_true(rows: list[Row], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    taken = build(rows).take(torch.tensor(mask, dtype=torch.bool))
    assert rows_of(taken) == [row for row, keep in zip(rows, mask, strict=True) if keep]


@given(st.lists(rows_strategy, min_size=1, max_size=4))
def test_concat_is_list_addition(parts: list[list[Row]]) -> None:
    assert rows_of(Batch.concat([build(part) for part in parts])) == [row for part in parts for row in part]


@given(rows_strategy, st.integers(0, 4))
def test_repeat_puts_the_copies_of_a_row_side_by_side(rows: list[Row], n: int) -> None:
    assert rows_of(build(rows).repeat(n)) == [row for row in rows for _ in range(n)]


@given(rows_strategy, st.integers(1, 12))
def test_split_is_near_even_loses_nothing_and_concat_undoes_it(rows: list[Row], parts: int) -> None:
    batch = build(rows)
    pieces = batch.split(parts)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [row for piece in pieces for row in rows_of(piece)] == rows
    assert Batch.concat(pieces).equal(batch)


@given(rows_strategy, st.data())
def test_split_by_sizes(rows: list[Row], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    pieces = build(rows).split([stop - start for start, stop in itertools.pairwise(bounds)])
    assert [rows_of(piece) for piece in pieces] == [rows[a:b] for a, b in itertools.pairwise(bounds)]


@given(rows_strategy, st.integers(-10, 10), st.integers(-10, 10), st.sampled_from([2, 4, 5]), st.booleans())
def test_a_batch_or_a_part_of_it_survives_pickling(rows, start, stop, protocol, out_of_band) -> None:
    batch = build(rows).slice(start, stop)
    buffers: list[Any] = []
    callback = buffers.append if out_of_band and protocol == 5 else None
    data = pickle.dumps(batch, protocol=protocol, buffer_callback=callback)
    back = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert back.equal(batch)
    assert rows_of(back) == rows[start:stop]


@given(rows_strategy)
def test_cloning_and_copying_change_nothing(rows: list[Row]) -> None:
    batch = build(rows)
    assert rows_of(batch.clone()) == rows
    assert copy.copy(batch) is batch
    assert copy.deepcopy(batch) is batch


@given(rows_strategy, st.randoms(use_true_random=False))
def test_columns_are_chosen_renamed_and_dropped_without_touching_rows(rows: list[Row], random: Any) -> None:
    batch = build(rows)
    names = random.sample(batch.columns, random.randint(0, len(batch.columns)))
    assert batch.select(names).columns == tuple(names)
    assert len(batch.select(names)) == len(rows)
    assert batch.drop(names).columns == tuple(name for name in batch.columns if name not in names)
    renamed = batch.rename({name: name + "_old" for name in names})
    assert renamed.rename({name + "_old": name for name in names}).equal(batch)
    for name in names:
        assert renamed[name + "_old"] is batch[name]


@given(st.lists(tokens, max_size=6))
@settings(max_examples=50)
def test_a_ragged_column_knows_the_row_of_each_token(rows: list[list[int]]) -> None:
    column = Ragged.from_list(rows)
    assert column.row.tolist() == [number for number, row in enumerate(rows) for _ in row]
    assert [row.tolist() for row in column] == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert Ragged.from_lengths(column.values, column.lengths).equal(column)
