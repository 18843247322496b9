"""A staged version of the weights as a process of the engine reads it: the other end of `Version.source`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.checksums import checksum
from enginehouse.weights.host_memory import private_copy


class StagedSource:
    """A version's tensors, by iterating: name and tensor. Those that lie in memory are views of it until `close`.

    Args:
        parameters: each as `Version.source` has it: name, dtype, shape, path of the memory, first byte there, checksum.
        directory: instead of them, a model directory with safetensors, whose files are opened as they are asked for.

    Raises:
        OSError: the memory is gone, or of another user.
    """

    def __init__(self, parameters: Sequence[Any] = (), directory: str = ""):
        self._directory = directory
        self._parameters = parameters
        self._memories = {path: private_copy(path) for path in {parameter[3] for parameter in parameters}}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._directory:
            yield from _in_directory(self._directory)
        for name, dtype, shape, path, begin, _ in self._parameters:
            yield name, _view(self._memories[path], dtype, shape, begin)

    def check(self) -> None:
        """See that all is there as it was staged.

        Raises:
            WeightSyncError: naming each parameter that is not.
        """
        if self._directory:
            return
        pairs = zip(self, self._parameters, strict=True)
        wrong = [name for (name, tensor), (*_, expected) in pairs if checksum(tensor) != expected]
        if wrong:
            raise WeightSyncError(f"{listed(wrong)} did not reach it as it was staged", wrong)

    def close(self) -> None:
        """Unmap the memory.

        Raises:
            WeightSyncError: the engine kept tensors that view it, which a later version would overwrite.
        """
        memories, self._memories, self._parameters = self._memories, {}, ()
        for memory in memories.values():
            _release(memory)


def _view(memory: mmap, dtype: str, shape: list[int], begin: int) -> torch.Tensor:
    """A tensor that views memory from its byte `begin` on."""
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=begin).view(shape)


def _in_directory(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model directory; its files are opened as they are asked for."""
    from safetensors import safe_open

    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                yield name, tensors.get_tensor(name)


def _release(memory: mmap) -> None:
    """Unmap a version.

    Raises:
        WeightSyncError: the engine kept tensors that view it, which a later version would overwrite.
    """
    try:
        memory.close()
    except BufferError:
        gc.collect()
        try:
            memory.close()
        except BufferError:
            raise WeightSyncError("it reads weights from memory that belongs to the update, not to itself") from None
