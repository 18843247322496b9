"""What a batch refuses, what it shares, and how it shows itself."""

from typing import Any

import numpy as np
import pytest
import torch

from enginehouse.data import Batch, BatchError, Ragged, UnknownColumnError, row_copies
from enginehouse.data import ragged as ragged_module
from enginehouse.errors import EnginehouseError


@pytest.fixture
def batch() -> Batch:
    ids = Ragged.from_list([[1, 2, 3], [], [4], [5, 6]])
    return Batch(
        {
            "input_ids": ids,
            "logprobs": ids.like(torch.arange(6.0)),
            "reward": torch.tensor([0.0, 1.0, 2.0, 3.0]),
            "prompt": ["a", "b", "c", "d"],
        }
    )


def shares(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "cut",
    [
        lambda b: b.slice(1, 3),
        lambda b: b.take([1, 2]),
        lambda b: b.take(torch.tensor([False, True, True, False])),
        lambda b: b.split([1, 2, 1])[1],
    ],
)
def test_consecutive_rows_are_a_view(batch: Batch, cut: Any) -> None:
    part = cut(batch)
    assert part["prompt"] == ("b", "c")
    assert part["input_ids"].offsets.tolist() == [0, 0, 1]
    assert shares(part["reward"], batch["reward"])
    assert shares(part["input_ids"].values, batch["input_ids"].values)
    assert part.nbytes == 2 * 4 + 1 * 8 + 1 * 4 + 3 * 8


def test_operations_on_columns_copy_nothing(batch: Batch) -> None:
    changed = batch.rename({"reward": "score"}).drop(["prompt"]).select(["score"]).with_columns(x=batch["reward"])
    assert changed["score"] is batch["reward"] is changed["x"]
    assert batch.columns == ("input_ids", "logprobs", "reward", "prompt")


def test_the_whole_of_a_batch_is_the_batch(batch: Batch) -> None:
    assert batch.slice(0) is batch
    assert batch.take(range(4)) is batch
    assert batch.repeat(1) is batch
    assert Batch.concat([batch]) is batch


def test_a_clone_shares_nothing_but_its_own_offsets(batch: Batch) -> None:
    clone = batch.clone()
    assert clone.equal(batch)
    assert not shares(clone["reward"], batch["reward"])
    assert not shares(clone["input_ids"].values, batch["input_ids"].values)
    assert clone["logprobs"].offsets is clone["input_ids"].offsets


@pytest.mark.parametrize("rows", [[], torch.tensor([]), np.array([])])
def test_taking_nothing_gives_an_empty_batch_of_the_same_columns(batch: Batch, rows: Any) -> None:
    empty = batch.take(rows)
    assert len(empty) == 0
    assert empty.columns == batch.columns
    assert Batch.concat([empty, batch, empty]).equal(batch)
    assert [len(part) for part in empty.split(3)] == [0, 0, 0]
    assert "Batch of 0 rows" in repr(empty)


def test_a_batch_without_columns_keeps_its_row_count(batch: Batch) -> None:
    bare = batch.select([])
    assert len(bare) == 4
    assert len(bare.slice(1, 3)) == 2
    assert len(Batch.concat([bare, bare])) == 8
    with pytest.raises(BatchError, match="'x' has 3 rows, but the batch has 4"):
        bare.with_columns(x=torch.zeros(3))
    assert len(Batch({}).with_columns(x=torch.zeros(3), y=[1, 2, 3])) == 3


def test_numpy_arrays_are_dense_columns_and_are_not_copied() -> None:
    array = np.arange(6.0).reshape(3, 2)
    frozen = array.copy()
    frozen.flags.writeable = False
    batch = Batch(
        {
            "a": array,
            "frozen": frozen,
            "turned": array[::-1],
            "big": array.astype(">f8"),
            "text": np.array(["x", "y", "z"]),
        }
    )
    assert batch["a"].data_ptr() == array.ctypes.data
    assert batch["frozen"].data_ptr() == frozen.ctypes.data
    assert batch["turned"].tolist() == array[::-1].tolist()
    assert batch["big"].tolist() == array.tolist()
    assert batch["text"] == ("x", "y", "z")


def test_columns_are_given_by_kind(batch: Batch) -> None:
    assert batch.tensor("reward") is batch["reward"]
    assert batch.ragged("input_ids") is batch["input_ids"]
    assert batch.objects("prompt") == ("a", "b", "c", "d")
    with pytest.raises(TypeError, match=r"'prompt' is 4 objects \(str\), not a ragged column"):
        batch.lengths("prompt")


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b["rewards"],
        lambda b: b.select(["rewards"]),
        lambda b: b.drop(["rewards"]),
        lambda b: b.rename({"rewards": "x"}),
        lambda b: b.lengths("rewards"),
    ],
)
def test_an_unknown_column_is_answered_with_the_nearest(batch: Batch, use: Any) -> None:
    with pytest.raises(UnknownColumnError, match=r"no column 'rewards'\. Did you mean 'reward'") as caught:
        use(batch)
    assert isinstance(caught.value, (KeyError, EnginehouseError))


def test_differing_row_counts_name_every_column() -> None:
    with pytest.raises(BatchError, match=r"a 2, b 3, c 1"):
        Batch({"a": torch.zeros(2), "b": ["x", "y", "z"], "c": Ragged.from_list([[1, 2]])})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "'x' must be .*, not int"),
        ("text", "'x' must be .*, not str"),
        (torch.tensor(1.0), "'x' is a single number"),
        (torch.zeros(2, 2).to_sparse(), "'x' is a torch.sparse_coo tensor"),
        ([torch.zeros(2), torch.zeros(3)], "'x' is a list of tensors: use Ragged.from_list"),
        (np.array(["2024-01-01"], dtype="datetime64[s]"), "'x': a numpy array of datetime64"),
    ],
)
def test_what_is_no_column_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises((TypeError, BatchError), match=message):
        Batch({"x": value})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1, 3], "fall from 2 to 1 at row 1"),
        ([0, 2], "from 0 to the number of its values, 3, but go from 0 to 2"),
        ([1, 3], "but go from 1 to 3"),
        ([], "of shape .0,."),
        ([0.0, 3.0], "torch.float64"),
        ([[0, 3]], "of shape .1, 2."),
    ],
)
def test_wrong_offsets_are_refused(offsets: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Ragged(torch.zeros(3), offsets)


def test_rows_that_do_not_lie_in_the_batch_are_refused(batch: Batch) -> None:
    for use in (
        lambda: batch.take([0, 4]),
        lambda: batch.take([-5]),
        lambda: batch.row(4),
        lambda: batch["input_ids"][4],
    ):
        with pytest.raises(IndexError, match="has 4 rows"):
            use()
    with pytest.raises(BatchError, match="mask of 2 rows"):
        batch.take([True, False])
    with pytest.raises(BatchError, match="float64"):
        batch.take([0.5])


def test_batches_that_do_not_fit_are_not_concatenated(batch: Batch) -> None:
    with pytest.raises(BatchError, match="batch 1 has input_ids, logprobs, prompt"):
        Batch.concat([batch, batch.drop(["reward"])])
    with pytest.raises(BatchError, match=r"'reward' differs .* float32 .* in batch 0, dense int64"):
        Batch.concat([batch, batch.with_columns(reward=batch["reward"].long())])
    with pytest.raises(BatchError, match=r"'prompt' differs .* in batch 1"):
        Batch.concat([batch, batch.with_columns(prompt=batch["reward"])])
    with pytest.raises(BatchError, match="no batch"):
        Batch.concat([])


def test_the_order_of_columns_does_not_matter_for_concat_and_equal(batch: Batch) -> None:
    turned = batch.select(reversed(batch.columns))
    assert turned.equal(batch)
    assert Batch.concat([batch, turned]).columns == batch.columns


def test_equality_sees_values_lengths_dtypes_and_takes_nan_for_nan(batch: Batch) -> None:
    nan = batch.with_columns(reward=torch.tensor([float("nan"), 1.0, 2.0, 3.0]))
    assert nan.equal(nan.clone())
    assert not nan.equal(batch)
    assert not batch.equal(batch.with_columns(reward=batch["reward"].double()))
    assert not batch.equal(batch.with_columns(prompt=["a", "b", "c", "e"]))
    assert not batch.equal(batch.with_columns(input_ids=Ragged.from_list([[1, 2], [3], [4], [5, 6]])))
    assert not batch.equal(batch.slice(1))


def test_a_batch_is_not_iterated_by_accident(batch: Batch) -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(batch)  # type: ignore[call-overload]
    with pytest.raises(UnknownColumnError, match="indexed by column name, not 0"):
        batch[0]  # type: ignore[index]
    with pytest.raises(TypeError, match="list of column names"):
        batch.select("reward")


def test_renaming_onto_another_column_is_refused(batch: Batch) -> None:
    with pytest.raises(BatchError, match="the same name"):
        batch.rename({"reward": "prompt"})


def test_a_batch_shows_its_columns(batch: Batch) -> None:
    lines = repr(batch).splitlines()
    assert lines[0] == "Batch of 4 rows, 128 bytes"
    assert lines[1] == "  input_ids  ragged, 4 rows of int64, 6 tokens, 0 to 3 a row"
    assert lines[3] == "  reward     dense float32 (4,)"
    assert lines[4] == "  prompt     4 objects (str)"


def test_large_results_are_right_too() -> None:
    """Beyond a size memory comes from another allocator."""
    rows = row_copies.HUGE_BYTES // 8 + 3
    column = torch.arange(rows, dtype=torch.int64)
    batch = Batch({"x": column, "tokens": Ragged.from_lengths(column.to(torch.bfloat16), [rows, *[0] * (rows - 1)])})
    double = Batch.concat([batch, batch])
    assert torch.equal(double["x"], torch.cat([column, column]))
    assert double["tokens"].lengths[rows] == rows
    assert torch.equal(batch.take(torch.arange(rows - 1, -1, -1))["x"], column.flip(0))


def test_sequences_of_vectors_are_ragged_too() -> None:
    column = Ragged.from_list([torch.zeros(2, 3), torch.ones(1, 3)])
    assert column[1].tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(BatchError, match="2 rows"):
        Ragged.from_list([torch.zeros(2, 3), torch.ones(1, 4)])


def test_the_dtype_of_a_ragged_column_follows_what_is_given() -> None:
    assert Ragged.from_list([[1], [2]]).dtype is torch.int64
    assert Ragged.from_list([[1], [2.5]])[1].tolist() == [2.5]
    assert Ragged.from_list([[0.1]]).dtype is torch.float32
    assert Ragged.from_list([[True], []]).dtype is torch.bool
    assert Ragged.from_list([[], []]).dtype is torch.int64
    assert Ragged.from_list([]).dtype is torch.int64
    assert Ragged.from_list([[1]], dtype=torch.bfloat16).dtype is torch.bfloat16
    assert Ragged.from_list([torch.ones(2), torch.ones(1)]).dtype is torch.float32
    assert Ragged.from_list([np.ones(2, np.int32)], dtype=torch.int64).dtype is torch.int64


def test_aligned_values_are_checked() -> None:
    column = Ragged.from_list([[1, 2], [3]])
    assert column.like(torch.zeros(3)).aligned(column)
    assert not Ragged.from_list([[1], [2, 3]]).aligned(column)
    with pytest.raises(BatchError, match="each of 3 tokens"):
        column.like(torch.zeros(2))


def test_columns_of_the_same_lengths_come_to_share_their_offsets() -> None:
    """What a worker sends back has offsets of its own; they must not travel on beside those already there."""
    ids, back, other = (Ragged.from_list(rows) for rows in ([[1, 2], [3]], [[7, 8], [9]], [[1], [2, 3]]))
    batch = Batch({"ids": ids, "back": back}).with_columns(other=other, again=Ragged.from_list([[4, 5], [6]]))
    assert batch["ids"].offsets is batch["back"].offsets is batch["again"].offsets
    assert batch["other"].offsets is other.offsets
    assert batch["back"].equal(back)


def test_moving_a_batch_leaves_offsets_on_the_host(batch: Batch) -> None:
    """`meta` stands in for an accelerator: it is a device of its own on every machine."""
    moved = batch.to("meta")
    assert moved["reward"].device.type == moved["input_ids"].device.type == "meta"
    assert moved["input_ids"].offsets.device.type == "cpu"
    assert moved["logprobs"].offsets is moved["input_ids"].offsets
    assert len(moved.take([2, 0]).slice(0, 1)) == 1


@pytest.mark.gpu
@pytest.mark.gpu
def test_operations_on_a_device_give_what_they_give_on_the_host(batch: Batch) -> None:
    import pickle

    moved = batch.to("cuda")
    for use in (
        lambda b: b.take([3, 0, 0]),
        lambda b: b.repeat(3),
        lambda b: b.slice(1, 3),
        lambda b: Batch.concat([b, b]),
    ):
        assert use(moved)["input_ids"].device.type == "cuda"
        assert use(moved).to("cpu").equal(use(batch))
    assert torch.equal(moved["input_ids"].row.cpu(), batch["input_ids"].row)
    assert pickle.loads(pickle.dumps(moved)).equal(batch)


@pytest.mark.parametrize("rows", [[2, 0, 3], [1], [3, 3, 0], []])
def test_long_rows_are_taken_like_short_ones(rows: list[int]):
    lengths = [2000, 0, 700, 1500]
    ids = Ragged.from_lengths(torch.arange(sum(lengths)), lengths)
    batch = Batch({"ids": ids, "half": ids.like((ids.values % 97).to(torch.bfloat16))}).take(rows)
    assert [row.tolist() for row in batch["ids"]] == [ids[row].tolist() for row in rows]
    assert [row.tolist() for row in batch["half"]] == [(ids[row] % 97).tolist() for row in rows]
    assert batch["half"].offsets is batch["ids"].offsets


@pytest.mark.parametrize("at_a_time", [1, 2, 2**20])
@pytest.mark.parametrize("rows", [[[1, 5], [], [7], [2, 1, 3]], [[], [2], []], [[], []], []])
def test_values_of_each_row_are_put_together(monkeypatch, rows: list[list[int]], at_a_time: int):
    monkeypatch.setattr(ragged_module, "REDUCED_TOKENS", at_a_time)
    column = Ragged.from_list(rows, torch.int64)
    assert column.reduced(np.add).tolist() == [sum(row) for row in rows]
    assert column.reduced(np.maximum, empty=-1).tolist() == [max(row, default=-1) for row in rows]


def test_true_values_of_each_row_are_counted():
    assert Ragged.from_list([[True, True, False], [False]]).reduced(np.add).tolist() == [2, 0]
