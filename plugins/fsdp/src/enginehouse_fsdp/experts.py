"""Experts: a checkpoint stores them separately, and each rank holds some entries of their fused parameters.

FSDP shards a parameter by its first dimension. In a parameter of fused experts this dimension counts the experts, so a
rank holds whole experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Shard

from enginehouse.errors import ModelError

if TYPE_CHECKING:
    from enginehouse_torch.modeling.stored import StoredForm, StoredPart


def own_parts(form: StoredForm, state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `state` under their names in the checkpoint.

    Of a tensor of fused experts, yield one view for each expert that this rank holds.
    """
    for name, tensor in state.items():
        for part in form.parts(name):
            if part.entry is None:
                yield part.name, tensor
            else:
                own, first = _entries(name, tensor)
                if first <= part.entry < first + own.shape[0]:
                    yield part.name, part.cut(own, first)


def owners(name: str, tensor: torch.Tensor, part: StoredPart) -> tuple[int, ...]:
    """Return the ranks that hold a stored part of the parameter `name`; empty if all ranks do."""
    if not isinstance(tensor, DTensor) or part.entry is None:
        return ()
    mesh, axis = tensor.device_mesh, _shard_axis(name, tensor)
    most = -(-tensor.shape[0] // mesh.shape[axis])
    return tuple(mesh.mesh.select(axis, part.entry // most).flatten().tolist())


def _entries(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the entries of a parameter that this rank holds, and the index of the first."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    axis = _shard_axis(name, tensor)
    each = -(-tensor.shape[0] // tensor.device_mesh.shape[axis])
    return tensor.to_local(), tensor.device_mesh.get_local_rank(axis) * each


def _shard_axis(name: str, tensor: DTensor) -> int:
    """Return the axis of the mesh over which a parameter's entries are distributed.

    Raises:
        ModelError: the layout cuts entries, so that no rank holds a whole entry.
    """
    sharded = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    if len(sharded) != 1 or not tensor.placements[sharded[0]].is_shard(0):
        raise ModelError(
            f"fsdp: {name!r} is stored as one tensor for each expert, but the layout {tensor.placements} splits these "
            "tensors: shard this model only over data-parallel ranks"
        )
    return sharded[0]
