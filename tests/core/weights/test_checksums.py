"""The checksum that a device computes: its value, and what changes it."""

import pytest
import torch
from device_waits import sum_on
from hypothesis import given
from hypothesis import strategies as st
from pretend import count_waits

from enginehouse.weights import checksums
from enginehouse.weights.checksums import are_of_one_kind, checksum, checksum_like, mixed_checksum

WRAPPED = 2**64


def by_hand(content: bytes) -> str:
    """MurmurHash3's finalizer of each word, xored with its place times the golden ratio, in Python's own numbers."""
    total = len(content)
    for place in range(0, len(content), 8):
        word = int.from_bytes(content[place : place + 8], "little")
        mixed = word ^ (place // 8 + 1) * 0x9E3779B97F4A7C15 % WRAPPED
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ mixed >> 33) * factor % WRAPPED
        total += mixed ^ mixed >> 33
    return f"mixed-{total % WRAPPED:016x}"


@given(st.binary(max_size=200), st.sampled_from([1, 2, 3, 1 << 20]))
def test_a_mixed_checksum_is_what_python_computes_however_it_is_cut(content, words):
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "WORDS_AT_ONCE", words)
        assert mixed_checksum(tensor) == by_hand(content)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn])
def test_it_is_of_the_bytes_whatever_their_shape_dtype_and_place(dtype):
    tensor = torch.randn(37, 5).to(dtype)
    wanted = by_hand(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    beside = torch.cat((torch.zeros(3).to(dtype).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)))
    assert mixed_checksum(tensor) == wanted
    assert mixed_checksum(tensor.t().contiguous().t()) == wanted
    if dtype.itemsize == 1:
        assert mixed_checksum(beside[3:].view(dtype)) == wanted, "a view that begins within a word"
    assert mixed_checksum(torch.zeros(0, dtype=dtype)) == "mixed-" + "0" * 16


def corruptions(tensor):
    """Copies of a float32 tensor that are wrong in one way each."""
    rows = len(tensor)
    for number in range(64):
        flipped = tensor.clone()
        flipped.view(torch.int32).view(-1)[number * 7 % tensor.numel()] ^= 1 << number % 32
        yield f"bit {number}", flipped
    yield "two rows swapped", tensor[[1, 0, *range(2, rows)]]
    yield "two words swapped", tensor.view(-1, 2).flip(0).view(tensor.shape)
    yield "moved by a row", tensor.roll(1, 0)
    yield "negated", -tensor
    yield "zeroes at the end", torch.cat((tensor[:-1], torch.zeros_like(tensor[:1])))
    yield "rounded", tensor.bfloat16().float()
    yield "one zero more", torch.cat((tensor.view(-1), torch.zeros(1)))


def test_each_corruption_changes_it():
    tensor = torch.randn(64, 32)
    right = mixed_checksum(tensor)
    assert mixed_checksum(tensor.clone()) == right
    assert [name for name, wrong in corruptions(tensor) if mixed_checksum(wrong) == right] == []


def test_a_device_computes_it_and_the_host_reads_one_number():
    waits = count_waits(sum_on)["mixed_checksum"]
    assert waits.reads == {"checksums.py:mixed_checksum": 1}
    assert not waits.to_host
    assert not waits.to_device


def test_a_checksum_is_of_the_kind_that_it_is_compared_with():
    tensor = torch.randn(9)
    assert checksum_like(tensor, None) == checksum_like(tensor, checksum(tensor)) == checksum(tensor)
    assert checksum_like(tensor, mixed_checksum(tensor)) == mixed_checksum(tensor)
    assert are_of_one_kind({"a": checksum(tensor)}, {"b": checksum(tensor)})
    assert not are_of_one_kind({"a": checksum(tensor)}, {"b": mixed_checksum(tensor)})


@pytest.mark.parametrize(("threaded_bytes", "task_bytes"), [(1 << 30, 1), (0, 1), (0, 4000), (0, 4028), (0, 1 << 30)])
def test_threads_sum_each_tensor_in_order(threaded_bytes, task_bytes, monkeypatch):
    monkeypatch.setattr(checksums, "THREADED_BYTES", threaded_bytes)
    monkeypatch.setattr(checksums, "TASK_BYTES", task_bytes)
    tensors = [torch.randn(size) for size in (0, 1, 1000, 7, 50_000, 3)]
    assert checksums.checksums(tensors) == [checksum(tensor) for tensor in tensors]
