"""The wire format: whose memory a received batch lies in, and what is sent."""

import math
import multiprocessing
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from enginehouse.data import WIRE_VERSION, Batch, Ragged, WireVersionError, wire


def send(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


@pytest.mark.parametrize("dtype", wire.DTYPES.values(), ids=wire.DTYPES)
def test_every_dtype_arrives_and_is_picked_bit_for_bit(dtype: torch.dtype) -> None:
    for rows, *rest in [(5,), (5, 3), (0,), (4, 0), (0, 3)]:
        width = math.prod(rest) * dtype.itemsize
        content = torch.randint(0, 2, (rows, width), dtype=torch.uint8)
        column = content.flatten().view(dtype).view(rows, *rest)
        batch = Batch({"x": column, "tokens": Ragged.from_lengths(column, [0] * (rows - 1) + [rows] * bool(rows))})
        assert batch.equal(batch.clone())
        for protocol in (4, 5):
            back = pickle.loads(pickle.dumps(batch, protocol=protocol))
            for arrived in (back["x"], back["tokens"].values):
                assert arrived.dtype is dtype
                assert arrived.shape == column.shape
                assert bytes_of(arrived) == bytes_of(content)
        backwards = list(range(rows - 1, -1, -1))
        assert bytes_of(batch.take(backwards)["x"]) == bytes_of(content[backwards])
        assert bytes_of(batch.repeat(2)["x"]) == bytes_of(content.repeat_interleave(2, dim=0))
        assert bytes_of(Batch.concat([batch, batch])["x"]) == bytes_of(torch.cat([content, content]))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def test_no_side_copies() -> None:
    batch = Batch({"x": torch.arange(100), "r": Ragged.from_list([[1, 2], *[[]] * 99])})
    data, buffers = send(batch)
    addresses = {torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() for buffer in buffers}
    assert addresses == {batch["x"].data_ptr(), batch["r"].values.data_ptr(), batch["r"].offsets.data_ptr()}
    received = [bytes(buffer.raw()) for buffer in buffers]
    back = pickle.loads(data, buffers=received)
    own = {torch.frombuffer(bytearray(b), dtype=torch.uint8).numel(): b for b in received}
    assert back["x"].untyped_storage().nbytes() == 800
    assert bytes(back["x"].numpy().data) == own[800]
    assert back["x"].data_ptr() == torch.frombuffer(own[800], dtype=torch.uint8).data_ptr()


def test_a_part_sends_its_own_bytes_only() -> None:
    base = Batch({"x": torch.zeros(1_000_000), "r": Ragged.from_lengths(torch.zeros(1_000_000), [1] * 1_000_000)})
    part = base.slice(500_000, 500_010)
    _, buffers = send(part)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [40, 40, 88]
    assert len(pickle.dumps(part, protocol=5)) < 1000
    assert len(pickle.dumps(part, protocol=4)) < 1000


def test_what_is_not_contiguous_arrives_contiguous() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    back = pickle.loads(pickle.dumps(Batch({"x": tensor}), protocol=5))["x"]
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


def test_conjugated_numbers_and_gradients_are_resolved() -> None:
    weights = torch.ones(2, requires_grad=True)
    batch = Batch({"z": torch.tensor([1 + 2j]).conj().repeat(2).conj(), "w": weights * 2})
    back = pickle.loads(pickle.dumps(batch, protocol=5))
    assert torch.equal(back["z"], batch["z"])
    assert back["w"].tolist() == [2.0, 2.0]
    assert not back["w"].requires_grad


def test_shared_offsets_are_sent_once_and_shared_again() -> None:
    ids = Ragged.from_list([[1, 2, 3], [4]])
    batch = Batch({"ids": ids, "mask": ids.like(torch.ones(4, dtype=torch.bool)), "logprobs": ids.like(torch.zeros(4))})
    data, buffers = send(batch)
    assert len(buffers) == 4
    back = pickle.loads(data, buffers=buffers)
    assert back["ids"].offsets is back["mask"].offsets is back["logprobs"].offsets


def test_a_ragged_column_travels_alone_too() -> None:
    column = Ragged.from_list([[1, 2], [3]])
    data, buffers = send({"column": column})
    assert len(buffers) == 2
    assert pickle.loads(data, buffers=buffers)["column"].equal(column)


@pytest.mark.parametrize("value", [Batch({"x": torch.zeros(2)}), Ragged.from_list([[1]])], ids=["batch", "ragged"])
def test_another_wire_version_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WIRE_VERSION", WIRE_VERSION + 1)
    data = pickle.dumps(value)
    monkeypatch.undo()
    with pytest.raises(
        WireVersionError, match=f"wire format {WIRE_VERSION + 1}, but this process reads wire format {WIRE_VERSION}"
    ):
        pickle.loads(data)


@pytest.mark.slow
@pytest.mark.parametrize("always", ["False", "True"])
def test_reading_warns_of_nothing_but_others_are_still_warned(always: str) -> None:
    """In a process of its own: torch gives this warning once a process."""
    program = f"""
import pickle, torch, warnings
from enginehouse.data import Batch
torch.set_warn_always({always})
data = pickle.dumps(Batch({{"x": torch.zeros(3), "y": torch.zeros(3, 4)}}), protocol=5)
buffers = []
lean = pickle.dumps(Batch({{"x": torch.zeros(3)}}), protocol=5, buffer_callback=buffers.append)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        pickle.loads(data)
        pickle.loads(lean, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert not caught, caught
    torch.from_numpy(__import__("numpy").frombuffer(b"abcd", "uint8"))
    assert len(caught) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_a_batch_crosses_a_plain_process_pool() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(Batch.slice, (Batch({"x": torch.arange(3)}), 1, 3))["x"].tolist() == [1, 2]
