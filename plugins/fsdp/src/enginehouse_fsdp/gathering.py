"""Gathers many sharded tensors at once, whichever axes split them.

FSDP splits the parts that tensor parallelism has made of a tensor, so the axis `tp` precedes `dp_shard` in the order of
splitting, although `tp` follows it in the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

SPLITTING_ORDER = ("dp_replicate", "tp", "dp_shard")
"""Axes in the order in which they split a tensor."""

Axes = tuple[str, ...]
"""Names of a mesh's axes, in the mesh's order."""


@dataclass(slots=True)
class Gathering:
    """Tensors that are being gathered.

    Attributes:
        names: names of the tensors.
        tensors: the tensors: DTensors, and tensors that every rank holds whole.
        alone: DTensors, by name, that this rank holds completely, so that nothing is gathered or copied.
        parts: by splitting axes, every rank's parts end to end, `(*ranks of each axis, elements)`.
        work: the communication that fills `parts`.
    """

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    alone: dict[str, torch.Tensor] = field(default_factory=dict)
    parts: dict[Axes, torch.Tensor] = field(default_factory=dict)
    work: list[dist.Work] = field(default_factory=list)

    @classmethod
    def start(
        cls, names: Sequence[str], tensors: Sequence[torch.Tensor], owned: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Gathering:
        """Start gathering; collective.

        Args:
            names: names of the tensors.
            tensors: tensors that show how each is split.
            owned: this rank's part of each tensor, which may differ from the part that the tensor itself holds.
            dtype: dtype of the gathered tensors.
        """
        gathering = cls(names, tensors)
        by_axes: dict[Axes, list[tuple[DTensor, torch.Tensor]]] = {}
        for name, tensor, own in zip(names, tensors, owned, strict=True):
            if isinstance(tensor, DTensor) and count_parts(tensor) == 1:
                gathering.alone[name] = own.to(dtype)
            elif isinstance(tensor, DTensor):
                by_axes.setdefault(splitting_axes(tensor), []).append((tensor, own))
        for axes, pairs in by_axes.items():
            mesh = pairs[0][0].device_mesh
            parts = _pack(pairs, dtype)
            work = None
            for axis in reversed(axes):
                if work is not None:
                    work.wait()
                sent, group = parts, mesh.get_group(axis)
                parts = sent.new_empty((group.size(), *sent.shape))
                work = dist.all_gather_into_tensor(parts.view(-1), sent.view(-1), group=group, async_op=True)
            assert work is not None
            gathering.work.append(work)
            gathering.parts[axes] = parts
        return gathering

    def wait(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the communication, and yield each name with its whole tensor."""
        for work in self.work:
            work.wait()
        offsets = dict.fromkeys(self.parts, 0)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if not isinstance(tensor, DTensor):
                yield name, tensor
                continue
            if name in self.alone:
                yield name, self.alone[name]
                continue
            axes = splitting_axes(tensor)
            size = _largest_part(tensor)
            yield name, _join_parts(tensor, axes, self.parts[axes][..., offsets[axes] : offsets[axes] + size])
            offsets[axes] += size


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_dimensions(tensor: DTensor) -> dict[str, int]:
    """Return the dimension of a tensor that each axis splits."""
    named = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return {axis: placement.dim for axis, placement in named if not placement.is_replicate()}  # type: ignore[attr-defined]


def splitting_axes(tensor: DTensor) -> Axes:
    """Return the axes that split a tensor, at least one."""
    return tuple(split_dimensions(tensor))


def count_parts(tensor: DTensor) -> int:
    """Return the number of parts into which the ranks split a tensor. Replicas of a part do not count."""
    return math.prod(_size(tensor.device_mesh, axis) for axis in splitting_axes(tensor))


def region(tensor: DTensor, coordinates: dict[str, int]) -> tuple[slice, ...]:
    """Return the part of the whole tensor that the rank with these coordinates on the splitting axes holds."""
    split = split_dimensions(tensor)
    bounds = [(0, size) for size in tensor.shape]
    for axis in sorted(split, key=SPLITTING_ORDER.index):
        begin, end = bounds[split[axis]]
        most = -(-(end - begin) // _size(tensor.device_mesh, axis))
        begin = min(begin + coordinates[axis] * most, end)
        bounds[split[axis]] = (begin, min(begin + most, end))
    return tuple(slice(begin, end) for begin, end in bounds)


def _join_parts(tensor: DTensor, axes: Axes, parts: torch.Tensor) -> torch.Tensor:
    """Assemble a tensor from every rank's part, `(*ranks of each axis, elements)`."""
    if len(axes) == 1 and split_dimensions(tensor)[axes[0]] == 0:  # the parts are in order
        return parts.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]
    whole = parts.new_empty(tensor.shape)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in parts.shape[:-1])).view(-1, len(axes)).tolist():
        target = whole[region(tensor, dict(zip(axes, place, strict=True)))]
        target.copy_(parts[tuple(place)][: target.numel()].view(target.shape))
    return whole


def _pack(pairs: Sequence[tuple[DTensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's parts end to end, each padded to the size of the largest part of any rank."""
    rooms = [_largest_part(tensor) for tensor, _ in pairs]
    packed = torch.empty(sum(rooms), dtype=dtype, device=pairs[0][1].device)
    for room, (_, own) in zip(packed.split(rooms), pairs, strict=True):
        room[: own.numel()] = own.reshape(-1)
        room[own.numel() :] = 0
    return packed


def _largest_part(tensor: DTensor) -> int:
    """Return the number of elements of the largest part, which the first rank holds."""
    first = region(tensor, dict.fromkeys(splitting_axes(tensor), 0))
    return math.prod(dimension.stop - dimension.start for dimension in first)


def _size(mesh: DeviceMesh, axis: str) -> int:
    return mesh.size((mesh.mesh_dim_names or ()).index(axis))
