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

from enginehouse.engines.weights import ParamMeta, pack_buckets
from enginehouse_megatron.axes import CONTEXT, DATA, TENSOR
from enginehouse_megatron.placing import Placed, Stored

if TYPE_CHECKING:
    from enginehouse_megatron.forms import Heads

BUCKET_BYTES = 256 << 20
"""How much is put together at once, a larger tensor excepted."""


class SplitWeights:
    """The `WeightSource` of a model split by matrices and layers.

    Args:
        placed: this rank's parameters.
        stages: the stored tensors of each pipeline stage, in the order of its parameters.
        heads: sizes of the attention.
        sizes: of each axis (`axis_sizes`).
        dtype: of the weights.
        bucket_bytes: how much is put together at once.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        stages: Sequence[Sequence[Stored]],
        heads: Heads,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._placed = placed
        self._heads = heads
        self._sizes = sizes
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._tensors = [(stage, stored) for stage, own in enumerate(stages) for stored in own]
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()

    def metadata(self) -> list[ParamMeta]:
        """All parameters, stage after stage; tied ones once."""
        replicas = self._sizes[DATA] * self._sizes[CONTEXT]
        ranks = replicas * self._sizes[TENSOR]
        return [
            ParamMeta(
                name=stored.name,
                dtype=str(self._dtype).removeprefix("torch."),
                shape=stored.shape,
                owners=tuple(range(stage * ranks, (stage + 1) * ranks)),
                mesh_shape=(replicas, self._sizes[TENSOR]),
                placements=("R", "R" if stored.split is None else f"S{stored.split}"),
            )
            for stage, stored in self._tensors
        ]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of each tensor of its stage."""
        rank, size = self._tensor.rank(), self._tensor.size()
        for one in self._placed:
            yield from zip((stored.name for stored in one.stored), one.parts(self._heads, rank, size), strict=True)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each whole tensor on every rank, put together a bucket at a time."""
        local = self.iter_local()
        for bucket in pack_buckets(self.metadata(), self._bucket_bytes):
            members = [self._tensors[index] for index in bucket]
            for stage in sorted({stage for stage, _ in members}):
                stored = [one for number, one in members if number == stage]
                parts = [next(local)[1] for _ in stored] if stage == self._stage else None
                yield from self._whole(stage, stored, parts)

    def _whole(
        self, stage: int, stored: Sequence[Stored], parts: Sequence[torch.Tensor] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of a stage, on every rank.

        Args:
            stage: whose they are.
            stored: the tensors.
            parts: this rank's part of each, where it is on that stage.
        """
        sizes = [math.prod(one.shape) for one in stored]
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=self._placed[0].parameter.device)
        wholes = [flat.view(one.shape) for one, flat in zip(stored, buffer.split(sizes), strict=True)]
        if parts is not None:
            self._join(stored, parts, wholes)
        if self._pipeline.size() > 1:
            dist.broadcast(buffer, dist.get_global_rank(self._pipeline, stage), group=self._pipeline)
        yield from zip((one.name for one in stored), wholes, strict=True)

    def _join(self, stored: Sequence[Stored], parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]) -> None:
        """Fill whole tensors from the parts of the ranks that split them; collective over these."""
        ranks = self._tensor.size()
        split = [
            (one, part, whole)
            for one, part, whole in zip(stored, parts, wholes, strict=True)
            if one.split is not None and ranks > 1
        ]
        rooms = [math.prod(place.stop - place.start for place in one.region(0, ranks)) for one, _, _ in split]
        for one, part, whole in zip(stored, parts, wholes, strict=True):
            if one.split is None or ranks == 1:
                whole.copy_(part)
        if not split:
            return
        sent = wholes[0].new_zeros(sum(rooms))
        for room, (_, part, _) in zip(sent.split(rooms), split, strict=True):
            room[: part.numel()].copy_(part.reshape(-1))
        got = sent.new_empty(ranks, len(sent))
        dist.all_gather_into_tensor(got.view(-1), sent, group=self._tensor)
        for rank, of_rank in enumerate(got):
            for room, (one, _, whole) in zip(of_rank.split(rooms), split, strict=True):
                target = whole[one.region(rank, ranks)]
                target.copy_(room[: target.numel()].view(target.shape))
