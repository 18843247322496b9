"""Attention over rows packed into one sequence, by transformers' own functions, without a dense mask.

Rows without a shared prompt use flash-attention, or torch's own copy of it, which gets the end of each row. Trees of
rows (`packing`) use `flex_attention`, which gets the blocks of tokens that may attend to each other. Without these
functions rows are padded and trees masked, for `scaled_dot_product_attention`. The choice depends on the device and on
the installed packages.

Of flash-attention's own packages none has yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from enginehouse.errors import ConfigError
from enginehouse.quiet import quiet_transformers
from enginehouse_torch.modeling.heads import ModelInput, token_outputs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PreTrainedModel

    from enginehouse.engines.train import Outputs
    from enginehouse_torch.modeling.packing import TreeLayout
    from enginehouse_torch.options import AttentionChoice

PADDED_ATTENTION = "sdpa"
"""Attention function of padded input."""
BLOCK = 128
"""Number of tokens of a block, for which the kernels of `flex_attention` are written."""
AMPERE, HOPPER = 8, 9
"""Major compute capabilities: the lowest that flash-attention supports, and the capability that version 3 needs."""
VARLEN = "varlen_attention"
"""Name under which torch's own flash-attention (`torch.nn.attention.varlen`) is registered with transformers."""


@dataclass(frozen=True, slots=True)
class AttentionChoices:
    """Attention functions of packed rows, by transformers' names.

    Attributes:
        rows: function that takes the end of each row, like `flash_attention_2`; None: rows without a shared prompt are
            padded.
        trees: function that takes a block mask, like `flex_attention`; None: trees are padded and have a dense mask.
    """

    rows: str | None = None
    trees: str | None = None

    def packs(self, trees: bool) -> bool:
        """Return True if batches with trees are packed, or, with `trees=False`, batches without trees."""
        return bool(self.trees if trees else self.rows)


PADDED = AttentionChoices()

GRAPHS = 64
"""Maximum number of `flex_attention` graphs that a process compiles. A model needs several: with and without gradients,
for one block and for many. Beyond torch's default, 8, `flex_attention` runs uncompiled and computes scores of all pairs
of tokens."""


def expect_graphs() -> None:
    """Let this process compile up to `GRAPHS` graphs, for models that use `flex_attention`."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)


def choose_attention(wanted: AttentionChoice, device: torch.device, dtype: torch.dtype) -> AttentionChoices:
    """Choose the attention functions for the option `attention`; flash-attention has no kernels for float32."""
    if wanted == "auto":
        if device.type != "cuda":
            return PADDED
        return AttentionChoices(
            _choose_flash(device) if dtype in (torch.bfloat16, torch.float16) else None, "flex_attention"
        )
    if wanted == "sdpa":
        return PADDED
    return AttentionChoices(None if wanted == "flex_attention" else wanted, "flex_attention")


def _choose_flash(device: torch.device) -> str | None:
    """Return the newest installed flash-attention that supports `device`, else torch's own, else None."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available() and torch.cuda.get_device_capability(device)[0] == HOPPER:
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    major = torch.cuda.get_device_capability(device)[0]
    return VARLEN if major >= AMPERE and _has_varlen() else None


def _has_varlen() -> bool:
    """Return True if torch has `varlen_attn` with the arguments that `varlen_attention` uses, as it has since 2.11."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return _has_argument(varlen_attn, "scale") and _has_argument(varlen_attn, "window_size")


@functools.cache
def _has_argument(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each row by torch's own kernels; transformers calls it like its flash-attention."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    ends, longest = cu_seq_lens_q, max_length_q
    grouped: dict[str, Any] = {}
    if _has_argument(varlen_attn, "enable_gqa"):  # before torch 2.12 the kernels take grouped heads unasked
        grouped["enable_gqa"] = query.shape[1] != key.shape[1]
    attended: Any = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **grouped
    )
    return attended[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInput(ModelInput):
    """A packed layout as tensors on the model's device.

    Attributes:
        attention: transformers' name of the attention function.
        arguments: the function's arguments besides `allowed`, which is a block mask or None.
    """

    attention: str
    arguments: Mapping[str, Any]


def model_input(
    layout: TreeLayout, ids: npt.NDArray[np.int64], device: torch.device, attention: AttentionChoices
) -> ModelInput:
    """Return a layout as tensors; `ids` are the batch's flat tokens.

    Raises:
        ConfigError: the layout is packed, and `attention` has no function for it.
    """
    padded = ModelInput.from_layout(layout, ids, device)
    if layout.packed is None:
        return padded
    arguments: Mapping[str, Any] = {}
    allowed: BlockMask | None = None
    if layout.branch is None and attention.rows:
        name, arguments = attention.rows, row_ends(layout.packed, device)
    elif attention.trees:
        name, allowed = attention.trees, block_mask(layout, device)
    else:
        raise ConfigError("rows were packed into one sequence, but no attention function for packed rows was chosen")
    shared = {field.name: getattr(padded, field.name) for field in fields(ModelInput)}
    shared |= {"positions": torch.from_numpy(layout.positions).to(device, non_blocking=True), "allowed": allowed}
    return PackedInput(**shared, attention=name, arguments=arguments)


def row_ends(lengths: npt.NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """Return flash-attention's arguments for consecutive rows of these `lengths` (`FlashAttentionKwargs`).

    Without them transformers derives them from positions, and waits for the device in every layer.

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `(rows + 1,)`: the start of each row, and the end of the last row;
        `max_length_q` and `max_length_k`: length of the longest row.
    """
    ends = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device, non_blocking=True)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def block_mask(layout: TreeLayout, device: torch.device) -> BlockMask:
    """Return a packed layout's mask by blocks of tokens instead of all pairs.

    Within a block that is allowed only in part, the segments of two tokens decide whether one may attend to the other.
    """
    from torch.nn.attention.flex_attention import BlockMask

    own, prompt = (torch.from_numpy(part.astype(np.int32)).to(device, non_blocking=True) for part in layout.segments())

    def allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & ((own[key] == own[query]) | (own[key] == prompt[query]))

    some, whole = layout.blocks(BLOCK)
    of_some, of_whole = _list_blocks(some & ~whole, device), _list_blocks(whole, device)
    length = len(own)
    return BlockMask.from_kv_blocks(
        *of_some, *of_whole, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(length, length)
    )


def _list_blocks(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each query block the number of key blocks that it attends to, and the indices of all key blocks.

    The key blocks that it attends to come first. Both results are int32.
    """

    def tensor(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32))[None, None].to(device, non_blocking=True)

    return tensor(blocks.sum(-1)), tensor(np.argsort(~blocks, axis=-1, kind="stable"))


def packed_token_outputs(model: PreTrainedModel, inputs: ModelInput, outputs: Outputs) -> dict[str, torch.Tensor]:
    """Compute `token_outputs` for a model that takes packed and padded input.

    The attention function stays set after the call, because activation checkpointing computes blocks again with it.
    """
    if not isinstance(inputs, PackedInput):
        attend_by(model, PADDED_ATTENTION)
        return token_outputs(model, inputs, outputs)
    attend_by(model, inputs.attention)
    with _pass_arguments(model, inputs.arguments):
        return token_outputs(model, inputs, outputs)


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Let all layers of a model use the attention function that transformers calls `name`.

    Raises:
        ImportError: the function is not installed.
        ValueError: the model does not support it.
    """
    if model.config.get_text_config()._attn_implementation != name:
        if name == VARLEN:
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import flash_attention_mask

            AttentionInterface.register(VARLEN, varlen_attention)
            AttentionMaskInterface.register(VARLEN, flash_attention_mask)
        with quiet_transformers():  # it warns of float32 parameters, though they compute in another dtype
            model.set_attn_implementation(name)


@contextlib.contextmanager
def _pass_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Pass `arguments` to the model's layers within the block; transformers forwards unknown arguments to them."""

    def add(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **arguments}

    hook = model.base_model.register_forward_pre_hook(add, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
