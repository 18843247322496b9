"""A model's weights under their Hugging Face names, put together from the ranks that split matrices and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state

from enginehouse.engines.weights import ParamMeta
from enginehouse.weights.buckets import pack_buckets
from enginehouse_megatron.axes import PIPELINE, TENSOR
from enginehouse_megatron.memory_estimate import BUCKET_BYTES
from enginehouse_megatron.weight_map import MappedParameter, StoredTensor

if TYPE_CHECKING:
    from enginehouse_megatron.forms import Heads


class SplitWeights:
    """The `WeightSource` of a model split by matrices and layers.

    Args:
        mapped: this rank's parameters.
        stages: the stored tensors of each pipeline stage, in an order that is that of each rank's own parameters.
        heads: sizes of the attention.
        sizes: of each axis (`axis_sizes`).
        dtype: of the weights.
        bucket_bytes: how much is put together at once.
    """

    def __init__(
        self,
        mapped: Sequence[MappedParameter],
        stages: Sequence[Sequence[StoredTensor]],
        heads: Heads,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._mapped = mapped
        self._heads = heads
        self._sizes = sizes
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._tensors = [(stage, stored) for stage, own in enumerate(stages) for stored in own]
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()

    def metadata(self) -> list[ParamMeta]:
        """All parameters, stage after stage; tied ones once."""
        return [self._described(stage, stored) for stage, stored in self._tensors]

    def _described(self, stage: int, stored: StoredTensor) -> ParamMeta:
        ranks = math.prod(self._sizes.values()) // self._sizes[PIPELINE]
        owners = tuple(range(stage * ranks, (stage + 1) * ranks))
        tensor = self._sizes[TENSOR]
        mesh_shape: tuple[int, ...] = (ranks // tensor, tensor)
        placements: tuple[str, ...] = ("R", "R" if stored.split is None else f"S{stored.split}")
        if stored.holder is not None:
            owners = owners[stored.holder :: self._experts.size()]
            mesh_shape, placements = (len(owners),), ("R",)
        dtype = str(self._dtype).removeprefix("torch.")
        return ParamMeta(stored.name, dtype, stored.shape, owners, mesh_shape, placements)

    def _has(self, stored: StoredTensor) -> bool:
        """Whether this rank has (a part of) a tensor of its stage."""
        return stored.holder in (None, self._experts.rank())

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor of its stage."""
        rank, size = self._tensor.rank(), self._tensor.size()
        for one in self._mapped:
            yield from zip((stored.name for stored in one.stored), one.parts(self._heads, rank, size), strict=True)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on every rank, put together a bucket at a time."""
        local = self.iter_local()
        for bucket in pack_buckets(self.metadata(), self._bucket_bytes):
            members = [self._tensors[index] for index in bucket]
            for stage in sorted({stage for stage, _ in members}):
                stored = [one for number, one in members if number == stage]
                here = stage == self._stage
                parts = [next(local)[1] if self._has(one) else None for one in stored] if here else None
                yield from self._whole(stage, stored, parts)

    def _whole(
        self, stage: int, stored: Sequence[StoredTensor], parts: Sequence[torch.Tensor | None] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of a stage, on every rank.

        Args:
            stage: whose they are.
            stored: the tensors.
            parts: this rank's part of each, None where it has none, if it is on that stage.
        """
        sizes = [math.prod(one.shape) for one in stored]
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=self._mapped[0].parameter.device)
        wholes = [flat.view(one.shape) for one, flat in zip(stored, buffer.split(sizes), strict=True)]
        if parts is not None:
            self._join(stored, parts, wholes)
        if self._pipeline.size() > 1:
            dist.broadcast(buffer, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
        yield from zip((one.name for one in stored), wholes, strict=True)

    def _join(
        self, stored: Sequence[StoredTensor], parts: Sequence[torch.Tensor | None], wholes: Sequence[torch.Tensor]
    ) -> None:
        """Fill whole tensors from the parts of the ranks that split them, or share them out; collective over these."""
        split, dealt = [], []
        for one, part, whole in zip(stored, parts, wholes, strict=True):
            if one.split is not None and self._tensor.size() > 1:
                split.append((one, part, whole))
            elif one.holder is not None and self._experts.size() > 1:
                dealt.append((one, part, whole))
            else:
                whole.copy_(part)
        ranks = self._tensor.size()
        places = [[whole[one.region(rank, ranks)] for one, _, whole in split] for rank in range(ranks)]
        _exchange([part for _, part, _ in split], places, self._tensor)
        places = [[whole for one, _, whole in dealt if one.holder == rank] for rank in range(self._experts.size())]
        _exchange([part for _, part, _ in dealt if part is not None], places, self._experts)


def _exchange(own: Sequence[torch.Tensor], places: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """Give every rank of a group what each of them has; collective over it, unless there is nothing.

    Args:
        own: what this rank has.
        places: for each rank, where what it has is written, in that order and those shapes.
        group: the ranks.
    """
    longest = max(sum(place.numel() for place in of_rank) for of_rank in places)
    if not longest:
        return
    sent = next(place for of_rank in places for place in of_rank).new_zeros(longest)
    for room, part in zip(_rooms(sent, own), own, strict=True):
        room.copy_(part)
    got = sent.new_empty(len(places), longest)
    dist.all_gather_into_tensor(got.view(-1), sent, group=group)
    for of_rank, received in zip(places, got, strict=True):
        for place, room in zip(of_rank, _rooms(received, of_rank), strict=True):
            place.copy_(room)


def _rooms(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of a flat tensor in the shapes of others, one after another."""
    at = 0
    for one in like:
        yield flat[at : at + one.numel()].view(one.shape)
        at += one.numel()
