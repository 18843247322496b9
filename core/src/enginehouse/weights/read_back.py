"""Compares what an engine's model holds after a load with the version that was staged, in a process of the engine.

An engine's loader splits and joins the parameters of a checkpoint, so its model has other names and shapes. While a
`CopyRecorder` is active, it notes which region of which staged tensor is copied into which region of which tensor. What
then is in a parameter of the model can be compared with the staged tensor, bit by bit, after each load. A parameter
that the engine fills in another way than by copies, for example packed for a processor's kernels, is not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.checksums import checksum
from enginehouse.weights.staged_source import StagedSource

COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations whose result is a copy of their first argument."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype that compares the bits of elements, by their size in bytes."""


@dataclass(frozen=True)
class Region:
    """The elements of a storage that a strided tensor shows."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        return cls(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def count(self) -> int:
        return torch.Size(self.size).numel()

    @property
    def end(self) -> int:
        """The first element of the storage behind the region."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)) + 1

    def overlaps(self, other: Region) -> bool:
        """Return False if the two regions surely have no element in common."""
        return self.offset < other.end and other.offset < self.end

    def contains(self, other: Region) -> bool:
        """Return True if this region has all elements between its first and its last, and `other` is among them."""
        dense = self.end - self.offset == self.count
        return dense and self.offset <= other.offset and other.end <= self.end

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this region of the tensor's storage, where `offset` counts from the tensor's first element."""
        return tensor.detach().as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copy:
    """A region of a storage that holds a region of a staged tensor.

    Attributes:
        name: name of the staged tensor.
        staged: its dtype.
        held: dtype of the storage's elements, into which they were converted at most once.
    """

    target: Region
    name: str
    source: Region
    staged: torch.dtype
    held: torch.dtype

    @property
    def keeps_layout(self) -> bool:
        """True if a view of the target shows what a view of the same sizes and strides shows of the source."""
        return (self.target.size, self.target.stride) == (self.source.size, self.source.stride)


class CopyRecorder(TorchDispatchMode):
    """Notes, while it is active, into which storages the content of staged tensors is copied, directly or in turn.

    A copy is forgotten when another operation writes to its target, or its target's storage is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, list[Copy]] = {}
        self._alive: dict[int, StorageWeakRef] = {}

    def follow(self, staged: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield staged tensors, whose copies are noted from now on."""
        for name, tensor in staged:
            whole = Region.of(tensor)
            self._of(tensor)[:] = [Copy(whole, name, replace(whole, offset=0), tensor.dtype, tensor.dtype)]
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        elif func in COPIES:
            self._note(result, args[0])
        elif func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[place] if place < len(args) else kwargs.get(argument.name)
                    for tensor in written if isinstance(written, list | tuple) else [written]:
                        self._forget(tensor)
        return result

    def copies_in(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[str, Copy]]]:
        """Return where the content of each staged tensor is in `tensors`, by the staged tensor's name.

        Returns:
            Pairs of a name in `tensors` and a copy, whose target is counted from that tensor's first element.
        """
        found = defaultdict(list)
        for key, tensor in tensors.items():
            whole = Region.of(tensor)
            for copy in self._of(tensor) if tensor.numel() else ():
                if copy.held == tensor.dtype and copy.target.overlaps(whole):
                    target = replace(copy.target, offset=copy.target.offset - whole.offset)
                    found[copy.name].append((key, replace(copy, target=target)))
        return dict(found)

    def _of(self, tensor: torch.Tensor) -> list[Copy]:
        """Return the copies that are noted for a tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive or self._alive[key].expired():
            self._alive[key], self._copies[key] = StorageWeakRef(storage), []
        return self._copies[key]

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note that `source` was copied into `target`."""
        copies = list(_content(self._of(source), source, target))
        self._forget(target)
        self._of(target).extend(copies)

    def _forget(self, tensor: Any) -> None:
        """Forget the copies that a write to a tensor may have changed."""
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            copies, written = self._of(tensor), Region.of(tensor)
            copies[:] = [copy for copy in copies if copy.held == tensor.dtype and not copy.target.overlaps(written)]


def _content(copies: Sequence[Copy], source: torch.Tensor, target: torch.Tensor) -> Iterator[Copy]:
    """Yield the copies that `target` holds after `source`, whose storage holds `copies`, was copied into it."""
    if source.shape != target.shape or not source.numel():
        return
    read, written = Region.of(source), Region.of(target)
    for former in copies:
        if former.held != source.dtype or (former.held != former.staged and former.held != target.dtype):
            continue  # other numbers in the same bits, or a second conversion
        copy = replace(former, held=target.dtype)
        if copy.target == read:
            yield replace(copy, target=written)
        elif copy.keeps_layout and copy.target.contains(read):
            moved = read.offset - copy.target.offset + copy.source.offset
            yield replace(copy, target=written, source=replace(read, offset=moved))
        elif read.stride == written.stride and read.contains(copy.target):
            moved = copy.target.offset - read.offset + written.offset
            yield replace(copy, target=replace(copy.target, offset=moved))


class ReadBack:
    """Compares a model's parameters with each version that it loads.

        with read_back.watch():
            load(read_back.follow(staged))
        read = read_back.compare(model, staged)

    The first load shows where staged tensors go; it takes longer, since each operation is looked at.
    """

    def __init__(self) -> None:
        self._recorder: CopyRecorder | None = CopyRecorder()
        self._copies: Mapping[str, Sequence[tuple[str, Copy]]] = {}

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context for all that fills the model's parameters; there may be several for one load."""
        return self._recorder or nullcontext()

    def follow(self, staged: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the staged tensors, for the engine's loader."""
        return iter(staged) if self._recorder is None else self._recorder.follow(staged)

    def compare(self, model: torch.nn.Module, source: StagedSource) -> list[tuple[int, str]]:
        """Compare a model with the version that it has just loaded.

        Returns:
            For each parameter of the version, the number of its elements that were compared, and are in the model; and
            the parameter's checksum.

        Raises:
            WeightSyncError: the model does not hold what was staged; the message names the version's parameters.
        """
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if self._recorder is not None:
            self._copies, self._recorder = self._recorder.copies_in(held), None
        read, wrong = [], []
        for (name, tensor), total in zip(source, source.sums, strict=True):
            copies = self._copies.get(name, ())
            if not all(key in held and _is_held(copy, held[key], tensor, total) for key, copy in copies):
                wrong.append(name)
            read.append((sum(region.count for region in {copy.source for _, copy in copies}), total))
        if wrong:
            raise WeightSyncError(f"the engine's model does not hold {listed(wrong)} as sent", wrong)
        return read


def merge_read(parameters: Iterable[Sequence[Any]], reports: Sequence[Sequence[tuple[int, str]]]) -> dict[str, str]:
    """Return the checksum of each parameter of which the ranks of an engine together have read back every element.

    Args:
        parameters: entries of `Version.source`.
        reports: what `ReadBack.compare` has returned on each rank.
    """
    return {
        name: ranks[0][1]
        for (name, _, shape, *_), ranks in zip(parameters, zip(*reports, strict=True), strict=True)
        if sum(count for count, _ in ranks) >= torch.Size(shape).numel() and len({read for _, read in ranks}) == 1
    }


def _is_held(copy: Copy, held: torch.Tensor, staged: torch.Tensor, staged_sum: str) -> bool:
    """Return True if `held` has the bits of `staged`, converted to its dtype, in the regions of a copy."""
    place = copy.target.view(held)
    if place.dtype == staged.dtype and copy.source == replace(Region.of(staged), offset=0):
        return checksum(place) == staged_sum  # reads one tensor, not two
    sent = copy.source.view(staged).to(device=held.device, dtype=held.dtype)
    bits = BITS[held.element_size()]
    return torch.equal(place.view(bits), sent.view(bits))
