"""Splits sequences over ranks, except in attention, where it splits heads instead (DeepSpeed-Ulysses).

Each rank of the axis `cp` holds one part of every sequence and all heads. An all-to-all before attention exchanges
these for whole sequences and a part of the heads, and another one after attention changes them back (Jacobs et al.
2023, arXiv:2309.14509). Attention itself is the model's own.
At the end the ranks exchange their tokens' outputs, so the loss sees every token on every rank. The backward pass of a
rank runs only through its own tokens.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from enginehouse.engines.options import check_divides
from enginehouse.errors import ConfigError
from enginehouse_torch.modeling.heads import ModelInput, token_outputs
from enginehouse_torch.modeling.rotary import find_length_dependent
from enginehouse_torch.modeling.sharing import attends_to_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from enginehouse.engines.train import Outputs

_numbers = itertools.count()


def check_sequence_split(model: PreTrainedModel, context_parallel: int, tensor_parallel: int) -> None:
    """Raise ConfigError if the model's attention cannot be split by heads."""
    asked = f"fsdp: context_parallel={context_parallel}"
    config = model.config.get_text_config()
    if not attends_to_all(config):
        raise ConfigError(
            f"{asked}: {type(model).__name__} has layers that are not full attention (sdpa); use context_parallel=1"
        )
    if find_length_dependent(model):
        raise ConfigError(
            f"{asked}: the RoPE of {type(model).__name__} has frequencies that depend on how long a row is, and a rank "
            "would see a part of it; use context_parallel=1"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    each = heads // tensor_parallel
    what = f"the {each} key-value head(s) that each rank of {type(model).__name__} has"
    check_divides("fsdp: context_parallel", context_parallel, each, what)


def split_sequences(
    model: PreTrainedModel, group: dist.ProcessGroup
) -> Callable[[PreTrainedModel, ModelInput, Outputs], dict[str, torch.Tensor]]:
    """Make the model run on parts of sequences, and return the replacement of `token_outputs`.

    The ranks of `group` share each sequence, and call the returned function together with the same input. Only the
    model's attention is replaced, so what was compiled or tried out with whole sequences stays valid.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"enginehouse_ulysses_{next(_numbers)}"
    ALL_ATTENTION_FUNCTIONS[name] = functools.partial(_attend, group)
    forget = weakref.finalize(model, ALL_ATTENTION_FUNCTIONS.pop, name, None)  # the entry would keep the group alive
    forget.atexit = False  # other ranks may be gone by then
    model.set_attn_implementation(name)
    return functools.partial(_token_outputs, group)


def _token_outputs(
    group: dist.ProcessGroup, model: PreTrainedModel, whole: ModelInput, outputs: Outputs
) -> dict[str, torch.Tensor]:
    """Compute `token_outputs` of all tokens; only this rank's tokens carry a gradient."""
    part, own = _take_part(whole, group.rank(), group.size())
    columns = token_outputs(model, part, outputs)
    return {name: _exchange(column, own, len(whole.targets), group) for name, column in columns.items()}


def _take_part(whole: ModelInput, rank: int, ranks: int) -> tuple[ModelInput, torch.Tensor]:
    """Return the input columns of one rank, and the indices of the needed tokens that this rank predicts."""
    sequences, length = whole.ids.shape
    each = -(-length // ranks)
    padding = each * ranks - length
    positions = whole.positions
    if positions is None:
        positions = torch.arange(length, device=whole.ids.device).expand(sequences, length)
    allowed = whole.allowed
    if allowed is not None and padding:  # a padded query has to attend to something
        allowed = torch.nn.functional.pad(allowed, (0, padding, 0, padding))
        allowed = allowed | torch.eye(each * ranks, dtype=torch.bool, device=allowed.device)
    columns = slice(rank * each, (rank + 1) * each)
    sequence, column = whole.predictor // length, whole.predictor % length
    own = (column // each == rank).nonzero()[:, 0]
    part = ModelInput(
        ids=torch.nn.functional.pad(whole.ids, (0, padding))[:, columns],
        positions=torch.nn.functional.pad(positions, (0, padding))[:, columns],
        allowed=allowed,
        predictor=(sequence * each + column % each)[own],
        targets=whole.targets[own],
    )
    return part, own


def _exchange(column: torch.Tensor, own: torch.Tensor, tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' parts of a column, `(tokens,)`. The elements of this rank, at `own`, keep their gradient."""
    sent = torch.zeros(tokens, dtype=column.dtype, device=column.device)
    sent[own] = column.detach()
    dist.all_reduce(sent, group=group)  # one rank has the value of a token, and all others send 0
    return sent.index_copy(0, own, column)


def _attend(
    group: dist.ProcessGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature that transformers calls; states are `(batch, heads, part of length, size)`.

    Returns:
        `(batch, part of length, heads, size)`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = (_exchange_dimensions(states, group) for states in (query, key, value))
    attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    return _exchange_dimensions(attended, group), None


def _exchange_dimensions(states: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Split the second dimension over the ranks and join the third: exchange all heads of a part of the positions for a
    part of the heads at all positions, or the reverse."""
    ranks, (batch, split, joined, size) = group.size(), states.shape
    apart = states.view(batch, ranks, split // ranks, joined, size).transpose(0, 1).contiguous()
    together = all_to_all_single_autograd(apart, None, None, group)
    return together.permute(1, 2, 0, 3, 4).reshape(batch, split // ranks, ranks * joined, size)
