"""A decoder layer made of torch's own operations, with the parameter names of transformer-engine's layer.

megatron-core's own layer without transformer-engine has other names, no packed sequences, no context parallelism and no
norms under sequence parallelism. This layer has them all, on CPUs and GPUs, and reads the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from enginehouse_megatron.experts import experts_layer
from enginehouse_megatron.options import has_transformer_engine


def decoder_layers(config: TransformerConfig, device: str, stage: int | None = None) -> Any:
    """Return the layers of this rank's part of the pipeline, or of its virtual stage `stage`.

    The layers are transformer-engine's on a GPU if it is installed, else made of torch's operations.
    """
    if uses_transformer_engine(device):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    first = get_transformer_layer_offset(config, vp_stage=stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    specs = [_layer(config, with_experts=_has_experts(config, number)) for number in numbers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return True if a layer, counted from 0, has experts."""
    frequency = config.moe_layer_freq
    has = frequency[layer] if isinstance(frequency, list) else layer % frequency == 0
    return config.num_moe_experts is not None and bool(has)


def _layer(config: TransformerConfig, *, with_experts: bool) -> ModuleSpec:
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    matrices = MLPSubmodules(linear_fc1=NormedColumnParallelLinear, linear_fc2=tensor_parallel.RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=NormedColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=tensor_parallel.RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if with_experts else IdentityOp,  # without experts the norm is in linear_fc1
            mlp=experts_layer() if with_experts else ModuleSpec(MLP, submodules=matrices),
            mlp_bda=get_bias_dropout_add,
        ),
    )


class RMSNorm(torch.nn.RMSNorm):
    """Stands in for `TENorm` with `normalization="RMSNorm"`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **arguments: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        # finalize_model_grads sums the gradients of marked parameters over the ranks that share a sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NormedColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Stands in for `TELayerNormColumnParallelLinear`: a norm, then a linear layer split by its outputs."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **arguments: Any):
        super().__init__(input_size, output_size, config=config, **arguments)
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype, device=_device(config))
        )
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        eps = self.config.layernorm_epsilon
        return super().forward(F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, eps), *args, **arguments)


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length, which are attended together, padded to the longest.

    Attributes:
        tokens: places of the rows' tokens in the micro-batch, int64 on the device.
        places: place of each of these tokens among the `rows` times `longest` tokens of the padded rows, likewise.
    """

    rows: int
    longest: int
    tokens: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class RowGroups:
    """The groups of a micro-batch, each padded to at most twice its tokens.

    Attributes:
        order: for each token of the micro-batch, its place among the tokens of all groups, int64 on the device.
    """

    groups: Sequence[RowGroup]
    order: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> RowGroups:
        """Group rows by the exponent of their length. All indices reach the device in one copy."""
        sizes = np.array(lengths)
        row = np.repeat(np.arange(len(sizes)), sizes)
        within = np.arange(len(row)) - (sizes.cumsum() - sizes)[row]
        exponents = np.frexp(np.maximum(sizes, 1) - 1)[1]  # lengths of 513 to 1024 tokens are in one group
        shapes, indices = [], []
        for exponent in np.unique(exponents):
            chosen = exponents == exponent
            longest = int(sizes[chosen].max())
            tokens = np.flatnonzero(chosen[row])
            shapes.append((int(chosen.sum()), longest))
            indices += [tokens, (chosen.cumsum() - 1)[row[tokens]] * longest + within[tokens]]
        indices.append(np.argsort(np.concatenate(indices[::2])))
        joined = torch.from_numpy(np.concatenate(indices)).to(device, non_blocking=True)
        *parts, order = joined.split([len(part) for part in indices])
        groups = [RowGroup(*shape, *parts[2 * number : 2 * number + 2]) for number, shape in enumerate(shapes)]
        return cls(groups, order)


@dataclass
class PackedRows(PackedSeqParams):
    """Packed rows whose lengths the host knows, so that no layer waits for the device to read them.

    `cu_seqlens_q` and `cu_seqlens_kv` are on the CPU, where megatron-core's rotary embedding reads them.
    transformer-engine's kernels need a `PackedSeqParams` on the GPU instead.
    """

    lengths: Sequence[int] = ()
    device: torch.device | None = None

    @cached_property
    def groups(self) -> RowGroups:
        """The rows in groups, made by the first layer that asks."""
        assert self.device is not None
        return RowGroups.of(self.lengths, self.device)


def pack_parameters(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Return the description of packed rows of these lengths in tokens, for the layers that `decoder_layers` gives."""
    begins = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    if uses_transformer_engine(device.type):
        begins = begins.to(device, non_blocking=True)
        return PackedSeqParams("thd", begins, begins, max_seqlen_q=longest, max_seqlen_kv=longest)
    return PackedRows(
        "thd", begins, begins, max_seqlen_q=longest, max_seqlen_kv=longest, lengths=lengths, device=device
    )


def uses_transformer_engine(device: str) -> bool:
    """Return True if the layers are transformer-engine's."""
    return device == "cuda" and has_transformer_engine()


class PackedAttention(MegatronModule):
    """Stands in for `TEDotProductAttention` on packed rows: causal, with grouped keys and values.

    Under context parallelism a rank has the chunks `r` and `2 * size - 1 - r` of each row, as megatron-core cuts it,
    and gathers the keys and values of the other ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **arguments: Any,
    ):
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return `(tokens, heads * size)`: each row attends to itself, causally, whatever the mask.

        This rank's queries are `(tokens, heads, size)`, its keys and values `(tokens, groups, size)`.
        """
        if self._group.size() == 1:
            return self._attend_whole(query, key, value, packed_seq_params.groups).flatten(1)
        return self._attend_split(query, key, value, packed_seq_params.lengths).flatten(1)

    def _attend_whole(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: RowGroups
    ) -> torch.Tensor:
        """Attend within whole rows: the rows of a group together, padded to the longest."""
        results = []
        for group in groups.groups:
            spread = (
                part.new_zeros(group.rows * group.longest, *part.shape[1:]).index_copy(
                    0, group.places, part[group.tokens]
                )
                for part in (query, key, value)
            )
            attended = F.scaled_dot_product_attention(
                *(part.unflatten(0, (-1, group.longest)).transpose(1, 2) for part in spread),
                is_causal=True,  # the padding is last
                scale=self._scale,
                enable_gqa=True,
            )
            results.append(attended.transpose(1, 2).flatten(0, 1)[group.places])
        return torch.cat(results)[groups.order]

    def _attend_split(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Attend within rows of which each rank has two chunks."""
        size, rank = self._group.size(), self._group.rank()
        tokens = len(query)
        gather = tensor_parallel.gather_from_sequence_parallel_region
        key, value = (gather(part.contiguous(), group=self._group) for part in (key, value))
        results, at = [], 0
        for length in lengths:
            chunk = length // size
            places = [slice(peer * tokens + at, peer * tokens + at + chunk) for peer in range(size)]
            keys, values = (torch.cat([part[place] for place in places]) for part in (key, value))
            positions = torch.cat([find_positions(length, size, peer) for peer in range(size)])
            positions = positions.to(query.device, non_blocking=True)
            allowed = positions[None] <= positions.unflatten(0, (size, chunk))[rank][:, None]
            attended = F.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in (query[at : at + chunk], keys, values)),
                attn_mask=allowed,
                scale=self._scale,
                enable_gqa=True,
            )
            results.append(attended[0].transpose(0, 1))
            at += chunk
        return torch.cat(results)


def find_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """Return a context-parallel rank's positions of a row, int64; `length` is a multiple of `2 * size`."""
    if size == 1:
        return torch.arange(length)
    chunk = length // (2 * size)
    last = 2 * size - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(last * chunk, (last + 1) * chunk)])


def _device(config: TransformerConfig) -> Any:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
