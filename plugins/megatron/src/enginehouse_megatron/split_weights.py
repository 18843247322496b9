"""Gives a model's weights under their Hugging Face names, joined from the ranks that split matrices and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from enginehouse.engines.weights import ParamMeta
from enginehouse.weights.buckets import pack_buckets
from enginehouse_megatron.axes import PIPELINE, TENSOR
from enginehouse_megatron.memory_estimate import BUCKET_BYTES
from enginehouse_megatron.weight_map import MappedParameter, StoredTensor

if TYPE_CHECKING:
    from enginehouse_megatron.forms import Heads


@dataclass(eq=False)
class SplitWeights:
    """The `WeightSource` of a model split by matrices and layers.

    `mapped` are this rank's parameters, `stages` the stored tensors of each pipeline stage (`gather_stages`), and
    `sizes` the sizes of the axes (`axis_sizes`).
    """

    mapped: Sequence[MappedParameter]
    stages: Sequence[Sequence[StoredTensor]]
    heads: Heads
    sizes: Mapping[str, int]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._tensors = [(stage, stored) for stage, own in enumerate(self.stages) for stored in own]
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()

    def metadata(self) -> list[ParamMeta]:
        """Describe all parameters, stage after stage; tied ones once."""
        return [self._describe(stage, stored) for stage, stored in self._tensors]

    def _describe(self, stage: int, stored: StoredTensor) -> ParamMeta:
        ranks = math.prod(self.sizes.values()) // self.sizes[PIPELINE]
        owners = tuple(range(stage * ranks, (stage + 1) * ranks))
        tensor = self.sizes[TENSOR]
        mesh_shape: tuple[int, ...] = (ranks // tensor, tensor)
        placements: tuple[str, ...] = ("R", "R" if stored.split is None else f"S{stored.split}")
        if stored.holder is not None:
            owners = owners[stored.holder :: self._experts.size()]
            mesh_shape, placements = (len(owners),), ("R",)
        dtype = str(self.dtype).removeprefix("torch.")
        return ParamMeta(stored.name, dtype, stored.shape, owners, mesh_shape, placements)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor of its stage."""
        rank, size = self._tensor.rank(), self._tensor.size()
        for mapped in self.mapped:
            yield from mapped.named_parts(self.heads, rank, size)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on every rank, joined a bucket at a time."""
        local = self.iter_local()
        rank = self._experts.rank()
        for bucket in pack_buckets(self.metadata(), BUCKET_BYTES):
            members = [self._tensors[index] for index in bucket]
            for stage in sorted({stage for stage, _ in members}):
                tensors = [stored for number, stored in members if number == stage]
                parts = None
                if stage == self._stage:
                    parts = [next(local)[1] if stored.holder in (None, rank) else None for stored in tensors]
                yield from self._iter_whole(stage, tensors, parts)

    def _iter_whole(
        self, stage: int, tensors: Sequence[StoredTensor], parts: Sequence[torch.Tensor | None] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors of a stage on every rank.

        `parts` are this rank's parts of the tensors; None if the rank is on another stage.
        """
        sizes = [math.prod(stored.shape) for stored in tensors]
        buffer = torch.empty(sum(sizes), dtype=self.dtype, device=self.mapped[0].parameter.device)
        wholes = [flat.view(stored.shape) for stored, flat in zip(tensors, buffer.split(sizes), strict=True)]
        if parts is not None:
            self._join(tensors, parts, wholes)
        if self._pipeline.size() > 1:
            dist.broadcast(buffer, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
        yield from zip((stored.name for stored in tensors), wholes, strict=True)

    def _join(
        self, tensors: Sequence[StoredTensor], parts: Sequence[torch.Tensor | None], wholes: Sequence[torch.Tensor]
    ) -> None:
        """Fill the whole tensors: gather the parts of split tensors, and copy unsplit tensors from the ranks that hold
        them. Collective over the tensor-parallel and expert-parallel groups."""
        split, dealt = [], []
        for stored, part, whole in zip(tensors, parts, wholes, strict=True):
            if stored.split is not None and self._tensor.size() > 1:
                split.append((stored, part, whole))
            elif stored.holder is not None and self._experts.size() > 1:
                dealt.append((stored, part, whole))
            else:
                whole.copy_(part)
        size = self._tensor.size()
        places = [[whole[stored.find_region(rank, size)] for stored, _, whole in split] for rank in range(size)]
        _exchange([part for _, part, _ in split], places, self._tensor)
        ranks = range(self._experts.size())
        places = [[whole for stored, _, whole in dealt if stored.holder == rank] for rank in ranks]
        _exchange([part for _, part, _ in dealt if part is not None], places, self._experts)


def _exchange(own: Sequence[torch.Tensor], places: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup) -> None:
    """All-gather: copy each rank's own tensors into `places[rank]` on every rank. Does nothing if no rank has any."""
    longest = max(sum(place.numel() for place in of_rank) for of_rank in places)
    if not longest:
        return
    sent = next(place for of_rank in places for place in of_rank).new_zeros(longest)
    for view, part in zip(_iter_views(sent, own), own, strict=True):
        view.copy_(part)
    received = sent.new_empty(len(places), longest)
    dist.all_gather_into_tensor(received.view(-1), sent, group=group)
    for of_rank, flat in zip(places, received, strict=True):
        for place, view in zip(of_rank, _iter_views(flat, of_rank), strict=True):
            place.copy_(view)


def _iter_views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield views of a flat tensor in the shapes of `like`, one after another."""
    begin = 0
    for tensor in like:
        yield flat[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()
