"""A batch in Ray's object store, with real Ray."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from enginehouse.data import Batch, Ragged

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=256 * MIB)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="module")
def large() -> Batch:
    """64 MiB in two columns."""
    tokens = torch.arange(4 * MIB)
    return Batch(
        {
            "input_ids": Ragged.from_lengths(tokens, [MIB] * 4),
            "hidden": torch.ones(4, 4 * MIB, dtype=torch.bfloat16),
            "prompt": ["a", "b", "c", {"deep": 1}],
        }
    )


def mapping_of(tensor: torch.Tensor) -> str:
    """The line of /proc/self/maps that the tensor's memory lies in."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, stop = (int(end, 16) for end in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < stop:
                return line
    raise AssertionError("the tensor's memory is not mapped")


def private_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_a_batch_read_from_the_store_is_a_view_of_the_store(large: Batch) -> None:
    reference = ray.put(large)
    before = private_bytes()
    first, second = ray.get(reference), ray.get(reference)
    assert first.equal(large)
    for column in ("hidden",):
        assert first[column].data_ptr() == second[column].data_ptr()
    assert first["input_ids"].values.data_ptr() == second["input_ids"].values.data_ptr()
    assert private_bytes() - before < 64 * MIB
    for tensor in (first["hidden"], first["input_ids"].values, first["input_ids"].offsets):
        assert "/plasma" in mapping_of(tensor) or "/dev/shm" in mapping_of(tensor)
    part = first.slice(2, 3)
    del first, second, reference
    assert part["input_ids"][0][5] == 2 * MIB + 5, "a view must keep the store's memory alive"


def test_a_worker_reads_the_same_memory_and_answers_with_a_batch(large: Batch) -> None:
    @ray.remote(num_cpus=0)
    def look(batch: Batch) -> tuple[bool, Batch]:
        with open("/proc/self/maps") as maps:
            shared = [
                [int(end, 16) for end in line.split()[0].split("-")]
                for line in maps
                if "plasma" in line or "/dev/shm" in line
            ]
        tensors = (batch["hidden"], batch["input_ids"].values)
        inside = all(any(start <= tensor.data_ptr() < stop for start, stop in shared) for tensor in tensors)
        return inside, batch.slice(1, 2).drop(["hidden"])

    inside, answer = ray.get(look.remote(ray.put(large)), timeout=120)
    assert inside, f"a worker copied the batch (driver {os.getpid()})"
    assert answer.equal(large.slice(1, 2).drop(["hidden"]))


def test_nested_and_empty_batches_cross_too(large: Batch) -> None:
    small: Any = {"parts": large.slice(0, 3).drop(["hidden"]).split(3), "none": large.slice(0, 0), "bare": Batch({})}
    back = ray.get(ray.put(small))
    assert [part.equal(old) for part, old in zip(back["parts"], small["parts"], strict=True)] == [True] * 3
    assert back["none"].equal(small["none"])
    assert len(back["bare"]) == 0
