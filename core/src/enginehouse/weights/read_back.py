"""Compares what an engine's model holds after a load with the version that was staged, in a process of the engine.

An engine's loader splits and joins the parameters of a checkpoint, so its model has other names and shapes. While a
`CopyRecorder` is active, it notes which region of which staged tensor is copied into which region of which tensor. What
is then in a parameter of the model can be compared with the staged tensor, bit by bit, after each load.

A parameter that the engine fills in another way than by copies, or of which it keeps another form, for example packed
for a kernel, counts as not read back.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from enginehouse.engines.weights import WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.checksums import checksum
from enginehouse.weights.staged_source import StagedSource

log = logging.getLogger(__name__)

COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
"""Operations whose result is a copy of their first argument."""

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes into which a conversion is followed. Numbers of 8 bits mean nothing without their scales."""

COMPARED_BYTES = 64 << 20
"""Number of bytes that are compared at once, because a device may have little free memory."""

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

    @classmethod
    def of_part(cls, part: torch.Tensor, whole: torch.Tensor) -> Region:
        """Return where `part`, a view of `whole`, is in it. `offset` counts from the first element of `whole`."""
        return cls(tuple(part.size()), tuple(part.stride()), int(part.storage_offset() - whole.storage_offset()))

    @property
    def count(self) -> int:
        return torch.Size(self.size).numel()

    @cached_property
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

    def as_plain_data(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the fields; `dataclasses.astuple` takes six times as long, for each of many regions."""
        return self.size, self.stride, self.offset

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
        """True if the elements of both lie in memory in the same order and distances."""
        return (self.target.size, self.target.stride) == (self.source.size, self.source.stride)


class CopyRecorder(TorchDispatchMode):
    """Notes, while it is active, into which storages the content of staged tensors is copied, directly or in turn.

    A copy is forgotten when another operation writes to its target, or its target's storage is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, list[Copy]] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._staged: set[int] = set()
        self._used: set[str] = set()  # names of staged tensors from which something else was calculated

    def follow(self, staged: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Forget an earlier load, and yield staged tensors, whose copies are noted from now on."""
        for noted in (self._copies, self._alive, self._staged, self._used):
            noted.clear()
        for name, tensor in staged:
            whole = Region.of(tensor)
            self._of(tensor)[:] = [Copy(whole, name, replace(whole, offset=0), tensor.dtype, tensor.dtype)]
            self._staged.add(tensor.untyped_storage()._cdata)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        elif func in COPIES:
            self._note(result, args[0])
        elif (schema := getattr(func, "_schema", None)) is not None:
            for place, argument in enumerate(schema.arguments):
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                alias = argument.alias_info
                for tensor in given if isinstance(given, list | tuple) else [given]:
                    if not _is_followed(tensor) or (alias is not None and not alias.is_write):
                        continue  # an alias that is not written is a view
                    if alias is None:
                        self._used |= {copy.name for copy in self._of(tensor)}
                    else:
                        self._forget(tensor)
        return result

    def copies_in(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[str, Copy]]]:
        """Return where the content of each staged tensor is in `tensors`, by the staged tensor's name.

        Tensors from which something else was made that lives on are left out.

        Returns:
            Pairs of a name in `tensors` and a copy, whose target is counted from that tensor's first element.
        """
        found = defaultdict(list)
        followed = {key: tensor for key, tensor in tensors.items() if _is_followed(tensor)}
        known = self._staged | {tensor.untyped_storage()._cdata for tensor in followed.values()}
        elsewhere = {
            copy.name
            for storage, copies in self._copies.items()
            if storage not in known and not self._alive[storage].expired()
            for copy in copies
        }
        for key, tensor in followed.items():
            whole = Region.of(tensor)
            for copy in self._of(tensor):
                if copy.held == tensor.dtype and copy.target.overlaps(whole):
                    target = replace(copy.target, offset=copy.target.offset - whole.offset)
                    found[copy.name].append((key, replace(copy, target=target)))
        return {name: copies for name, copies in found.items() if name not in elsewhere | self._used}

    def _of(self, tensor: torch.Tensor) -> list[Copy]:
        """Return the copies that are noted for a tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive or self._alive[key].expired():
            self._alive[key], self._copies[key] = StorageWeakRef(storage), []
        return self._copies[key]

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note that `source` was copied into `target`."""
        if not _is_followed(target):
            return
        copies = list(_content(self._of(source), source, target)) if _is_followed(source) else []
        self._forget(target)
        self._of(target).extend(copies)

    def _forget(self, tensor: torch.Tensor) -> None:
        """Forget the copies that a write to a tensor may have changed."""
        if copies := self._of(tensor):
            written = Region.of(tensor)
            copies[:] = [copy for copy in copies if copy.held == tensor.dtype and not copy.target.overlaps(written)]


def _is_followed(tensor: Any) -> bool:
    """Return True for a tensor that has elements in memory, as strided ones have."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and tensor.numel() > 0
        and tensor.element_size() in BITS
    )


def _content(copies: Sequence[Copy], source: torch.Tensor, target: torch.Tensor) -> Iterator[Copy]:
    """Yield the copies that `target` holds after `source`, whose storage holds `copies`, was copied into it."""
    if source.shape != target.shape or (source.dtype != target.dtype and target.dtype not in WIDE):
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
        """Return the staged tensors, for the engine's loader."""
        return iter(staged) if self._recorder is None else self._recorder.follow(staged)

    def compare(
        self, model: torch.nn.Module, source: StagedSource, packed: Container[int] = frozenset()
    ) -> list[ReadRegions]:
        """Compare a model with the version that it has just loaded.

        At the first load, a parameter that does not hold what was copied into it counts as one that the engine fills in
        another way, which a kernel may do unseen.

        Args:
            packed: `id` of parameters that the engine also keeps in another form. They count as not read back.

        Returns:
            For each parameter of the version, its checksum and the regions of it that are in the model.

        Raises:
            WeightSyncError: the model does not hold what was staged; the message names the version's parameters.
        """
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        first = self._recorder is not None
        if self._recorder is not None:
            plain = {key: tensor for key, tensor in held.items() if id(tensor) not in packed}
            self._copies, self._recorder = self._recorder.copies_in(plain), None
        read, wrong = [], []
        for (name, tensor), total in zip(source, source.sums, strict=True):
            copies = self._copies.get(name, ())
            try:
                equal = all(key in held and _is_held(copy, held[key], tensor, total) for key, copy in copies)
            except RuntimeError as error:  # such as no memory for the comparison
                log.warning("%s could not be read back: %s", name, error)
                equal, copies = True, ()
            if not equal:
                wrong.append(name)
            regions = {copy.source for _, copy in copies}
            all_of_it = replace(Region.of(tensor), offset=0) in regions
            read.append((total, "whole" if all_of_it else [region.as_plain_data() for region in regions]))
        if wrong and first:
            source.check_again(wrong)
            log.warning("%s cannot be read back: the engine fills them in another way", listed(wrong))
            self._copies = {name: copies for name, copies in self._copies.items() if name not in wrong}
            return self.compare(model, source)
        if wrong:
            raise WeightSyncError(f"the engine's model does not hold {listed(wrong)} as sent", wrong)
        return read


ReadRegions = tuple[str, str | list[Any]]
"""A parameter's checksum, and what a process holds of the parameter: `"whole"`, or a list of regions."""


def merge_read(parameters: Iterable[Sequence[Any]], reports: Sequence[Sequence[ReadRegions]]) -> dict[str, str]:
    """Return the checksum of each parameter of which the ranks of an engine together have read back every element.

    Args:
        parameters: entries of `Version.source`.
        reports: results of `ReadBack.compare`, by rank.
    """
    merged = {}
    for (name, _, shape, *_), ranks in zip(parameters, zip(*reports, strict=True), strict=True):
        sums, parts = zip(*ranks, strict=True)
        regions = {json.dumps(region) for part in parts if part != "whole" for region in part}
        count = sum(torch.Size(json.loads(region)[0]).numel() for region in regions)
        # Equal regions count once. If others overlapped, the sum could not be exact.
        if len({*sums}) == 1 and ("whole" in parts or count == torch.Size(shape).numel()):
            merged[name] = sums[0]
    return merged


def _is_held(copy: Copy, held: torch.Tensor, staged: torch.Tensor, staged_sum: str) -> bool:
    """Return True if `held` has the bits of `staged`, converted to its dtype, in the regions of a copy."""
    place, sent = copy.target.view(held), copy.source.view(staged)
    whole = place.dtype == staged.dtype and copy.source == replace(Region.of(staged), offset=0)
    if whole and place.device.type == "cpu":
        return checksum(place) == staged_sum  # reads one tensor, not two; a GPU compares faster than a CPU sums
    if not place.dim():
        place, sent = place[None], sent[None]
    rows = max(1, COMPARED_BYTES * len(place) // place.nbytes)
    bits = BITS[held.element_size()]
    return all(
        torch.equal(part.view(bits), other.to(device=held.device, dtype=held.dtype).view(bits))
        for part, other in zip(place.split(rows), sent.split(rows), strict=True)
    )
