"""A faster forward pass for the most common decoders: fewer and larger operations than the model's own modules.

It supports RMSNorm, rotary positions, grouped-query attention (with or without biases and query/key norms) and SwiGLU.
Projections that read the same input are one matrix here, and the model's parameters become views of it. The weights
therefore exist once. An update needs no rebuild unless it moves the parameters to other memory (`rebind`).
`choose_forward` compares the logits of this pass with the logits of the model's own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from enginehouse_torch.cache import KVCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary scaling whose angles do not depend on the sequence's length."""


class FusedForward:
    """The fused pass. Implements `enginehouse_torch.forward.Forward`."""

    @staticmethod
    def explain_unsupported(model: PreTrainedModel) -> str:
        """Return the reason why `model` cannot use this forward pass; empty if it can."""
        config = model.config
        if config.model_type not in MODEL_TYPES:
            return f"model type {config.model_type!r} is not one of {', '.join(MODEL_TYPES)}"
        layer_types = getattr(config, "layer_types", None)
        windowed = set(layer_types) - {"full_attention"} if layer_types else getattr(config, "sliding_window", None)
        if windowed:
            return "some of its layers attend to a window"
        if config.hidden_act != "silu":
            return f"its activation is {config.hidden_act!r}"
        if getattr(model.model.rotary_emb, "rope_type", "default") not in FIXED_ROTARY:
            return f"its rotary positions are of type {model.model.rotary_emb.rope_type!r}"
        linears = [model.lm_head]
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if unusual := next((linear for linear in linears if type(linear) is not nn.Linear), None):
            return f"one of its projections is a {type(unusual).__name__}"
        return ""

    def __init__(self, model: PreTrainedModel, positions: int):
        config = model.config
        self.positions = positions
        self.eps = config.rms_norm_eps
        # On a CPU in float32, `_norm` computes RMSNorm with half the operations of torch's own.
        written_out = model.dtype == torch.float32 and model.device.type == "cpu"
        self.eps_tensor = torch.tensor(self.eps) if written_out else None
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.embed = model.model.embed_tokens.weight
        self.norm = model.model.norm.weight
        self.head = model.lm_head.weight
        self._model = model
        self.rebind()
        self._rotary = model.model.rotary_emb
        self._angles = self._rotary_table(min(positions, 256))

    def rebind(self) -> None:
        """Make the matrices from the model's parameters."""
        self.layers = [_Layer(layer, self.heads, self.kv_heads) for layer in self._model.model.layers]

    def __call__(
        self, tokens: torch.Tensor, padding: torch.Tensor | None, cache: KVCache, all_logits: bool = False
    ) -> torch.Tensor:
        rows, new = tokens.shape
        used = cache.used
        cos, sin = self._cos_sin(used, new, padding)
        mask = _mask(used, new, padding)
        x = F.embedding(tokens, self.embed).view(rows * new, -1)
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer.attention_norm)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(rows, new, self.heads + 2 * self.kv_heads, -1)
            qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 2)
            if layer.qk_norms is not None:
                qk = self._norm(qk, layer.qk_norms.index_select(0, layer.norm_of_head))
            half = qk.shape[-1] // 2
            qk = torch.addcmul(qk * cos, torch.cat((qk[..., half:], qk[..., :half]), -1), sin)
            q, k = qk.split((self.heads, self.kv_heads), 2)
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
            x = _add_linear(x, self._attend(q, keys, values, mask), layer.output, layer.output_bias)
            h = self._norm(x, layer.mlp_norm)
            gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = _add_linear(x, F.silu(gate).mul_(up), layer.down, layer.down_bias)
        x = x.view(rows, new, -1)
        if not all_logits:
            x = x[:, -1:]
        return F.linear(self._norm(x, self.norm), self.head).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm over the last dimension; `weight` broadcasts."""
        if self.eps_tensor is None:
            if weight.dim() == 1:
                return F.rms_norm(x, x.shape[-1:], weight, self.eps)
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the attention of `(rows, new, heads, head_dim)` queries as `(rows * new, heads * head_dim)`."""
        rows, new, heads, head_dim = q.shape
        if new == 1:
            # Query heads that share a key-value head become its queries, so no key is copied.
            grouped = q.reshape(rows, self.kv_heads, -1, head_dim)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return attended.reshape(rows, heads * head_dim)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != self.kv_heads
        )
        return attended.transpose(1, 2).reshape(rows * new, heads * head_dim)

    def _cos_sin(self, used: int, new: int, padding: torch.Tensor | None) -> torch.Tensor:
        """Return cosines and signed sines, stacked; each broadcasts with `(rows, new, heads, head_dim)`."""
        if used + new > self._angles.shape[1]:
            self._angles = self._rotary_table(min(self.positions, 2 * (used + new)))
        if padding is None:
            return self._angles[:, used : used + new]
        columns = torch.arange(used, used + new, device=padding.device)
        return self._angles[:, (columns - padding[:, None]).clamp_(0, self.positions - 1)]

    def _rotary_table(self, positions: int) -> torch.Tensor:
        """Return `(2, positions, 1, head_dim)`: cosines, and sines with the sign of the rotation of halves."""
        cos, sin = self._rotary(self.embed[:1], torch.arange(positions, device=self.embed.device)[None])
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return torch.stack((cos[0], signed[0]))[:, :, None]


class _Layer:
    """The fused weights of one decoder layer; the module's parameters become views of them."""

    def __init__(self, layer: Any, heads: int, kv_heads: int):
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm = layer.input_layernorm.weight
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.qkv, self.qkv_bias = _fuse_linears((attention.q_proj, attention.k_proj, attention.v_proj))
        self.gate_up, self.gate_up_bias = _fuse_linears((mlp.gate_proj, mlp.up_proj))
        self.output, self.output_bias = attention.o_proj.weight, attention.o_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.qk_norms = None
        if hasattr(attention, "q_norm"):
            self.qk_norms = _fuse((attention.q_norm.weight, attention.k_norm.weight)).view(2, -1)
            kinds = torch.tensor([0, 1], device=self.qkv.device)
            self.norm_of_head = kinds.repeat_interleave(torch.tensor([heads, kv_heads], device=kinds.device))


def _fuse(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parameters along the first axis, and make each a view of its part.

    Parameters that are adjacent in memory already are not copied.
    """
    first, size = parameters[0].data, sum(len(parameter) for parameter in parameters)
    if _are_adjacent(parameters):
        return first.as_strided((size, *first.shape[1:]), first.stride())
    fused = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, fused.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return fused


def _are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Return True if parameters are in one storage, one after the other without a gap."""
    storage, place = parameters[0].untyped_storage().data_ptr(), parameters[0].storage_offset()
    for parameter in parameters:
        here = parameter.untyped_storage().data_ptr() == storage and parameter.storage_offset() == place
        if not (here and parameter.is_contiguous()):
            return False
        place += parameter.numel()
    return True


def _fuse_linears(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fuse weights and biases of linear layers that read the same input."""
    weight = _fuse([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return weight, None if linears[0].bias is None else _fuse(biases)


def _add_linear(x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x + linear(h)`; without a bias the sum needs no separate pass."""
    return torch.addmm(x, h, weight.t()) if bias is None else x + F.linear(h, weight, bias)


def _mask(used: int, new: int, padding: torch.Tensor | None) -> torch.Tensor | None:
    """Return a bool mask `(rows, 1, new, used + new)` of the positions that each new token attends to; None: all."""
    if padding is None:
        return None
    columns = torch.arange(used + new, device=padding.device)
    mask = (columns >= padding[:, None])[:, None, None]
    return mask if new == 1 else mask & (columns[:, None] >= columns)
