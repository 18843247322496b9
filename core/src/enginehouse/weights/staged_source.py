"""Reads a staged version of the weights in a process of the engine, by the description that `Version.source` gives."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.buckets import group_by_bytes
from enginehouse.weights.checksums import TASK_BYTES, THREADS, checksum
from enginehouse.weights.host_memory import PrivateMemory, map_privately


class StagedSource:
    """Yields the names and tensors of a version. Tensors of `parameters` are views of mapped memory, until `close`.

    Args:
        parameters: entries of `Version.source`: name, dtype, shape, path of the memory, first byte, checksum.
        directory: model directory whose safetensors files hold the version, if it is not in memory; else empty.

    Raises:
        OSError: the memory no longer exists, or belongs to another user.
    """

    def __init__(self, parameters: Sequence[Any] = (), directory: str = ""):
        self.directory = directory
        self._parameters = parameters
        self._memories = {path: PrivateMemory.take(path) for path in {parameter[3] for parameter in parameters}}
        self._yielded: list[StorageWeakRef] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.directory:
            yield from _read_directory(self.directory)
        for name, dtype, shape, path, begin, _ in self._parameters:
            tensor = _view_tensor(self._memories[path].memory, dtype, shape, begin)
            self._yielded.append(StorageWeakRef(tensor.untyped_storage()))
            yield name, tensor

    @property
    def sums(self) -> list[str]:
        """Checksums of `parameters`, in their order."""
        return [parameter[-1] for parameter in self._parameters]

    @contextmanager
    def checked(self, rank: int = 0, ranks: int = 1) -> Iterator[None]:
        """Check beside the block, in other threads, that parameters are as they were staged: all, or the share of one
        of several ranks that read the same memory. Raises `WeightSyncError` at the end of the block if parameters
        differ; the message names them. The block may write to the tensors, which are private to this process."""
        share = [] if self.directory else list(islice(zip(self, self.sums, strict=True), rank, None, ranks))
        tasks = group_by_bytes(share, lambda parameter: parameter[0][1].nbytes, TASK_BYTES)
        with ThreadPoolExecutor(THREADS, "check") as threads:
            checks = [threads.submit(_find_changed, task) for task in tasks]
            try:
                yield
            finally:
                self.check_again([name for check in checks for name in check.result()])

    def check_again(self, names: Collection[str]) -> None:
        """Check that parameters are as they were staged, in memory that this process maps anew, because a loader may
        have written to what it was given. Raises `WeightSyncError` if parameters differ; the message names them."""
        again = [parameter for parameter in self._parameters if parameter[0] in names]
        memories = {path: map_privately(path) for path in {parameter[3] for parameter in again}}
        wrong = [
            name
            for name, dtype, shape, path, begin, total in again
            if checksum(_view_tensor(memories[path], dtype, shape, begin)) != total
        ]
        if wrong:
            raise WeightSyncError(f"the staged weights have changed: {listed(wrong)}", wrong)

    def close(self) -> None:
        """End the use of the memory, which stays mapped for a later version. Raises `WeightSyncError` if the engine
        kept tensors that view the memory, which a later version would overwrite."""
        memories, self._memories, self._parameters = self._memories, {}, ()
        if not self._all_freed():
            gc.collect()
            if not self._all_freed():
                raise WeightSyncError("it kept tensors in the update's memory, instead of its own copies")
        for memory in memories.values():
            memory.keep()

    def _all_freed(self) -> bool:
        """Return True if no tensor that was yielded lives on."""
        return all(storage.expired() for storage in self._yielded)


def _find_changed(parameters: Iterable[tuple[tuple[str, torch.Tensor], str]]) -> list[str]:
    """Return the names of tensors that do not have the checksum beside them."""
    return [name for (name, tensor), total in parameters if checksum(tensor) != total]


def _view_tensor(memory: mmap, dtype: str, shape: list[int], begin: int) -> torch.Tensor:
    """Return a tensor that views memory at its byte `begin`."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=begin).view(shape)


def _read_directory(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model directory, one file after the other."""
    from safetensors import safe_open

    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                yield name, tensors.get_tensor(name)
