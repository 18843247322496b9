"""A distributed batch does what a batch does, and moves rows only where they are needed."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.controller import DispatchError, DistributedBatch
from enginehouse.data import Batch, BatchError, Ragged, UnknownColumnError


def batch_of(lengths: list[int], first: int = 0) -> Batch:
    rows = len(lengths)
    values = torch.arange(sum(lengths), dtype=torch.int32) + 1000 * first
    ids = Ragged.from_lengths(values, lengths)
    return Batch(
        {
            "ids": ids,
            "logprobs": ids.like(-values.float()),
            "reward": torch.arange(first, first + rows, dtype=torch.float32),
            "vector": torch.arange(2 * rows).reshape(rows, 2) + first,
            "note": [f"row {first + row}" for row in range(rows)],
        }
    )


shard_lengths = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=5)


def both(shards: list[list[int]]) -> tuple[Batch, DistributedBatch]:
    """The same rows at one place, and in shards."""
    firsts = np.cumsum([0, *map(len, shards)])
    parts = [batch_of(lengths, int(first)) for lengths, first in zip(shards, firsts)]
    return Batch.concat(parts), DistributedBatch.of(parts)


def check_same(distributed: DistributedBatch, whole: Batch) -> None:
    """Everything that can be asked of one is what the other says."""
    assert len(distributed) == len(whole)
    assert distributed.columns == whole.columns
    assert distributed.fetch().equal(whole)
    for name in whole.columns:
        assert Batch({name: distributed.column(name)}).equal(whole.select([name]))
        if isinstance(whole[name], Ragged):
            assert distributed.lengths(name).tolist() == whole.lengths(name).tolist()
    parts = list(distributed.shards())
    assert sum(map(len, parts)) == len(whole)
    if parts:
        assert Batch.concat(parts).equal(whole)


@pytest.mark.slow
@given(shard_lengths, st.data())
@settings(deadline=None, max_examples=80)
def test_every_chain_of_operations_gives_what_a_batch_gives(shards: list[list[int]], data: st.DataObject) -> None:
    whole, distributed = both(shards)
    check_same(distributed, whole)
    for _ in range(data.draw(st.integers(1, 4), label="operations")):
        rows = len(whole)
        kind = data.draw(
            st.sampled_from(["take", "mask", "slice", "split", "with", "join", "select", "drop", "concat"])
        )
        if kind == "take" and rows:
            index = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=8))
            whole, distributed = whole.take(index), distributed.take(index)
        elif kind == "mask":
            mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
            whole, distributed = whole.take(mask), distributed.take(mask)
        elif kind == "slice":
            start, stop = data.draw(st.integers(-9, 9)), data.draw(st.none() | st.integers(-9, 9))
            whole, distributed = whole.slice(start, stop), distributed.slice(start, stop)
        elif kind == "split":
            parts = data.draw(st.integers(1, 4))
            number = data.draw(st.integers(0, parts - 1))
            whole, distributed = whole.split(parts)[number], distributed.split(parts)[number]
        elif kind == "with":
            name = data.draw(st.sampled_from(["added", "reward", "ids"]))
            column: Any = torch.arange(rows) * 3
            if name == "ids":
                column = Ragged.from_lengths(torch.arange(2 * rows), [2] * rows)
            whole, distributed = whole.with_columns(**{name: column}), distributed.with_columns(**{name: column})
        elif kind == "join":
            names = data.draw(st.lists(st.sampled_from(["reward", "more", "added"]), min_size=1, unique=True))
            columns = {name: torch.arange(rows) + 7 * number for number, name in enumerate(names)}
            other = DistributedBatch.of(Batch(columns).split(data.draw(st.integers(1, 3))))
            distributed = distributed.joined(other)
            whole = whole.drop([name for name in names if name in whole]).with_columns(**columns)
        elif kind == "select":
            names = data.draw(st.permutations(whole.columns))[: data.draw(st.integers(1, len(whole.columns)))]
            whole, distributed = whole.select(names), distributed.select(names)
        elif kind == "drop" and len(whole.columns) > 1:
            name = data.draw(st.sampled_from(whole.columns))
            whole, distributed = whole.drop([name]), distributed.drop([name])
        elif kind == "concat":
            whole, distributed = Batch.concat([whole, whole]), DistributedBatch.concat([distributed, distributed])
        check_same(distributed, whole)


def test_a_shard_that_is_not_needed_any_more_is_let_go():
    _, distributed = both([[1, 2], [3], [4, 4]])
    assert "1 shard(s)" in repr(distributed.take([2]))
    assert "2 shard(s)" in repr(distributed.take([4, 0]))


def test_parts_of_a_shard_that_are_put_together_are_read_as_one():
    whole, distributed = both([[1, 2], [3, 1, 1]])
    again = DistributedBatch.concat([distributed.take([row]) for row in (3, 0, 4, 2)])
    check_same(again, whole.take([3, 0, 4, 2]))
    assert "2 shard(s)" in repr(again)


def test_rows_in_one_shard_are_read_without_a_copy():
    part = batch_of([3, 2, 4])
    distributed = DistributedBatch.of([part, batch_of([1], 3)])
    first = distributed.slice(0, 2).fetch()
    assert first["ids"].values.data_ptr() == part["ids"].values.data_ptr()


def test_columns_added_here_cover_those_of_the_shards():
    _, distributed = both([[1], [2]])
    changed = distributed.with_columns(reward=torch.tensor([7, 8]))
    assert changed.columns == distributed.columns
    assert changed.column("reward").tolist() == [7, 8]
    assert distributed.column("reward").tolist() == [0, 1]


def test_batches_without_rows_are_concatenated_with_what_was_added_to_them():
    _, distributed = both([[1], [2]])
    empty = distributed.slice(0, 0).with_columns(added=torch.zeros(0))
    assert DistributedBatch.concat([empty, empty]).fetch().columns == empty.columns


def test_mistakes_are_named():
    _, distributed = both([[1], [2]])
    with pytest.raises(UnknownColumnError, match=r"rewards.*Did you mean 'reward'"):
        distributed.column("rewards")
    with pytest.raises(TypeError, match="'reward' is dense"):
        distributed.lengths("reward")
    with pytest.raises(BatchError, match="3 rows, but the batch has 2"):
        distributed.with_columns(more=torch.zeros(3))
    with pytest.raises(BatchError, match="3 rows, but the batch has 2"):
        distributed.joined(DistributedBatch.of([Batch({"more": torch.zeros(3)})]))
    with pytest.raises(IndexError, match="row 5"):
        distributed.take([5])
    with pytest.raises(DispatchError, match="different columns"):
        DistributedBatch.of([batch_of([1]), Batch({"x": torch.zeros(1)})])
    with pytest.raises(BatchError, match=r"have different columns.*added here: more"):
        DistributedBatch.concat([distributed, distributed.with_columns(more=[1, 2])])
    with pytest.raises(DispatchError, match="must be a separate argument"):
        pickle.dumps([distributed])
