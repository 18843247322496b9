"""Attention over rows that are packed into one sequence, by transformers' own functions, without a dense mask.

Rows that share nothing go through flash-attention, which is told where each ends, or torch's own copy of it; trees of
rows (`packing`) through `flex_attention`, which is told which blocks of tokens may attend to which. Elsewhere rows are
padded, and trees masked, as `scaled_dot_product_attention` wants it. Which is used depends on the device and on what is
installed.

Not yet run on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
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
"""What is not packed attends by this, whatever else a model uses."""
BLOCK = 128
"""Tokens of a block: what the kernels of `flex_attention` are written for."""
AMPERE, HOPPER = 8, 9
"""Major compute capabilities: the least that flash-attention is for, and that of the devices version 3 is for."""
VARLEN = "varlen_attention"
"""torch's own flash-attention (`torch.nn.attention.varlen`), made known to transformers by this name."""


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """What packed rows attend by, in transformers' names.

    Attributes:
        rows: takes where each row ends, as `flash_attention_2`; None: rows without a shared prompt are padded.
        trees: takes a block mask, as `flex_attention`; None: trees are padded, and have a dense mask.
    """

    rows: str | None = None
    trees: str | None = None

    def packs(self, trees: bool) -> bool:
        """Whether a batch is packed that has trees, or has none."""
        return bool(self.trees if trees else self.rows)


PADDED = PackedAttention()

GRAPHS = 64
"""How often a process may compile `flex_attention`: each model has some, with and without gradients, with one block and
with many. At torch's own limit, 8, it goes on without compiling, and makes scores of the square of all tokens."""


def expect_graphs() -> None:
    """Let this process compile as many graphs as `GRAPHS`, for models that attend by `flex_attention`."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)


def choose_attention(wanted: AttentionChoice, device: torch.device, dtype: torch.dtype) -> PackedAttention:
    """What the option `attention` means here.

    Args:
        wanted: the option.
        device: where the model computes.
        dtype: what it computes in; flash-attention has no kernels for float32.
    """
    if wanted == "auto":
        if device.type != "cuda":
            return PADDED
        return PackedAttention(
            _choose_flash(device) if dtype in (torch.bfloat16, torch.float16) else None, "flex_attention"
        )
    if wanted == "sdpa":
        return PADDED
    return PackedAttention(None if wanted == "flex_attention" else wanted, "flex_attention")


def _choose_flash(device: torch.device) -> str | None:
    """The newest flash-attention that is installed and made for `device`, else torch's own; transformers finds none
    without a GPU."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available() and torch.cuda.get_device_capability(device)[0] == HOPPER:
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    major = torch.cuda.get_device_capability(device)[0]
    return VARLEN if major >= AMPERE and importlib.util.find_spec("torch.nn.attention.varlen") else None


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
    """Attend causally within each row by torch's own kernels; called by transformers as its flash-attention is."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states.transpose(1, 2).squeeze(0) for states in (query, key, value))
    ends, longest = cu_seq_lens_q, max_length_q
    found: Any = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return found[None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInput(ModelInput):
    """A packed layout as tensors on the model's device.

    Attributes:
        attention: transformers' name of what it attends by.
        arguments: what that is given beside `allowed`, which is a block mask or None.
    """

    attention: str
    arguments: Mapping[str, Any]


def model_input(
    layout: TreeLayout, ids: npt.NDArray[np.int64], device: torch.device, attention: PackedAttention
) -> ModelInput:
    """A layout as tensors; `ids` are the batch's flat tokens.

    Raises:
        ConfigError: it is packed, and `attention` has nothing for it.
    """
    given = ModelInput.from_layout(layout, ids, device)
    if layout.packed is None:
        return given
    arguments: Mapping[str, Any] = {}
    allowed: BlockMask | None = None
    if layout.branch is None and attention.rows:
        name, arguments = attention.rows, row_ends(layout.packed, device)
    elif attention.trees:
        name, allowed = attention.trees, block_mask(layout, device)
    else:
        raise ConfigError("rows were packed into one sequence, and there is no attention that takes them so")
    same = {field.name: getattr(given, field.name) for field in fields(ModelInput)}
    positions = torch.from_numpy(layout.positions).to(device, non_blocking=True)
    return PackedInput(
        **{**same, "positions": positions, "allowed": allowed, "attention": name, "arguments": arguments}
    )


def row_ends(lengths: npt.NDArray[np.int64], device: torch.device) -> dict[str, Any]:
    """What flash-attention is told of rows behind one another (`transformers`' `FlashAttentionKwargs`).

    Given with the input, it is not found out from positions, which waits for the device in every layer.

    Args:
        lengths: tokens of each.
        device: where they are.

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k`, int32 `(rows + 1,)`: where each begins, and where the last ends;
        `max_length_q` and `max_length_k`: tokens of the longest.
    """
    ends = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)).to(device, non_blocking=True)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def block_mask(layout: TreeLayout, device: torch.device) -> BlockMask:
    """What may attend to what in a packed layout, by blocks and, within some, by segments; nothing of their square."""
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
    """For each block of queries the number of its blocks of keys, and these before all others; int32, for all heads."""

    def tensor(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32))[None, None].to(device, non_blocking=True)

    return tensor(blocks.sum(-1)), tensor(np.argsort(~blocks, axis=-1, kind="stable"))


def packed_token_outputs(model: PreTrainedModel, given: ModelInput, outputs: Outputs) -> dict[str, torch.Tensor]:
    """`token_outputs` of packed input, and of padded input of a model that also takes packed.

    What the model attends by stays set: blocks that are computed again going back (activation checkpointing) need it.
    """
    if not isinstance(given, PackedInput):
        attend_by(model, PADDED_ATTENTION)
        return token_outputs(model, given, outputs)
    attend_by(model, given.attention)
    with _pass_arguments(model, given.arguments):
        return token_outputs(model, given, outputs)


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Let all layers of a model use the attention function that transformers knows as `name`.

    Raises:
        ImportError: it is not installed.
        ValueError: the model does not support it.
    """
    if model.config.get_text_config()._attn_implementation != name:
        if name == VARLEN:
            from transformers import AttentionInterface, AttentionMaskInterface
            from transformers.masking_utils import flash_attention_mask

            AttentionInterface.register(VARLEN, varlen_attention)
            AttentionMaskInterface.register(VARLEN, flash_attention_mask)
        with quiet_transformers():  # it warns of float32 parameters, which are computed with in another dtype
            model.set_attn_implementation(name)


@contextlib.contextmanager
def _pass_arguments(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within, the model's layers are given `arguments`, as transformers hands on what its models do not know."""

    def add(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **arguments}

    hook = model.base_model.register_forward_pre_hook(add, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
