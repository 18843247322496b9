"""A sharded model's weights under the names its Hugging Face checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from enginehouse.engines.weights import ParamMeta, pack_buckets
from enginehouse.modeling.state import unique_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUCKET_BYTES = 256 << 20
"""How much is gathered at once; two buckets are held: one is being gathered while the other is read."""


@dataclass(slots=True)
class _Gathering:
    """A bucket on its way."""

    names: list[str]
    tensors: list[torch.Tensor]
    parts: torch.Tensor | None
    work: dist.Work | None


class ShardedWeights:
    """The `WeightSource` of a model under FSDP2.

    Args:
        model: the sharded model.
        stored: names in the checkpoint it was loaded from; decide under which of its names a tied parameter goes.
        dtype: dtype the weights are given in; the parameters themselves are float32.
        bucket_bytes: how much is gathered at once.
    """

    def __init__(
        self, model: PreTrainedModel, stored: frozenset[str], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ):
        self._model = model
        self._stored = stored
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes

    def metadata(self) -> list[ParamMeta]:
        """All parameters and persistent buffers, tied ones once."""
        described = []
        for name, tensor in unique_state(self._model, self._stored).items():
            mesh_shape: tuple[int, ...] = ()
            placements: tuple[str, ...] = ()
            owners: tuple[int, ...] = ()
            if isinstance(tensor, DTensor):
                mesh_shape = tuple(tensor.device_mesh.shape)
                placements = tuple(f"S{p.dim}" if isinstance(p, Shard) else "R" for p in tensor.placements)
                owners = tuple(tensor.device_mesh.mesh.flatten().tolist())
            dtype = str(self._served(tensor)).removeprefix("torch.")
            described.append(ParamMeta(name, dtype, tuple(tensor.shape), owners, mesh_shape, placements))
        return described

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on every rank, gathered a bucket at a time, the next while this one is read."""
        state = unique_state(self._model, self._stored)
        names = list(state)
        buckets = pack_buckets(self.metadata(), self._bucket_bytes)
        coming: _Gathering | None = None
        for bucket in [*buckets, None]:
            following = None if bucket is None else self._gather([names[i] for i in bucket], state)
            if coming is not None:
                yield from _arrived(coming)
            coming = following

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor; empty where it has none."""
        for name, tensor in unique_state(self._model, self._stored).items():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield name, own.to(self._served(tensor))

    def _served(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _gather(self, names: list[str], state: dict[str, torch.Tensor]) -> _Gathering:
        """Start gathering a bucket: every rank's parts end to end, each padded to the largest part."""
        tensors = [state[name] for name in names]
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        if not sharded:
            return _Gathering(names, tensors, None, None)
        group = _shard_group(sharded[0])
        own = torch.cat([_padded_part(tensor, self._dtype) for tensor in sharded])
        parts = own.new_empty(group.size() * own.numel())
        work = dist.all_gather_into_tensor(parts, own, group=group, async_op=True)
        return _Gathering(names, tensors, parts.view(group.size(), -1), work)


def _arrived(bucket: _Gathering) -> Iterator[tuple[str, torch.Tensor]]:
    if bucket.work is not None:
        bucket.work.wait()
    at = 0
    for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
        if not isinstance(tensor, DTensor) or bucket.parts is None:
            yield name, tensor
            continue
        ranks = bucket.parts.shape[0]
        rows = tensor.shape[0]
        most = -(-rows // ranks)
        size = most * (tensor.numel() // rows if rows else 0)
        whole = bucket.parts[:, at : at + size].reshape(ranks * most, *tensor.shape[1:])
        at += size
        yield name, whole[:rows]


def _padded_part(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """This rank's rows, flat, padded to as many as the rank with the most has: all but the last have that many."""
    own = tensor.to_local()
    ranks = _shard_group(tensor).size()
    row = tensor.numel() // tensor.shape[0]
    padded = torch.zeros(-(-tensor.shape[0] // ranks) * row, dtype=dtype, device=own.device)
    padded[: own.numel()] = own.reshape(-1)
    return padded


def _shard_group(tensor: DTensor) -> dist.ProcessGroup:
    """The ranks that share one copy of a tensor."""
    axis = _shard_axis(tensor.placements)
    return tensor.device_mesh.get_group(axis)


def _shard_axis(placements: Sequence[object]) -> int:
    return next(axis for axis, placement in enumerate(placements) if isinstance(placement, Shard))
