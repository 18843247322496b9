"""Whether a model may compute a shared prompt once, and pack rows, and what attention costs it. See `packing`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from enginehouse.engines.train import Outputs
from enginehouse.errors import ConfigError
from enginehouse_torch.modeling.attention import (
    BLOCK,
    PADDED,
    PADDED_ATTENTION,
    PackedAttention,
    attend_by,
    choose_attention,
    expect_graphs,
    model_input,
    packed_token_outputs,
)
from enginehouse_torch.modeling.holding import VALUE_HEAD
from enginehouse_torch.modeling.packing import BatchRows, Tree, lay_out
from enginehouse_torch.modeling.rotary import find_length_dependent

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from enginehouse_torch.options import AttentionChoice

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a logprob that rounding explains: of bfloat16, two steps between logits of 16 to 32."""

CLEARLY = 10.0
"""How many times nearer a tree must come to the rows apart than the mistake that it is looked at for would."""

MASK_ELEMENT = 2e5
"""Multiplications that a GPU could do of a forward pass while its host writes an element of a dense mask: about 3 ns.
An estimate for an H100 in bfloat16, not measured. On a CPU it is next to nothing."""


def mask_cost(model: PreTrainedModel, attention: PackedAttention, device: torch.device) -> float | None:
    """What an element of the mask of a tree costs, in the unit of `attention_cost`; None: there are no masks."""
    if attention.trees:
        return None
    return 0.0 if device.type == "cpu" else MASK_ELEMENT / _multiplications(model)


def attention_cost(model: PreTrainedModel) -> float:
    """Multiplications of one token attending to one other, relative to those of one token's matrix products."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * heads * head_size / _multiplications(model)


def _multiplications(model: PreTrainedModel) -> int:
    """Of one token in the matrix products of a forward pass."""
    matrices = sum(p.numel() for p in model.base_model.parameters() if p.dim() > 1)
    return max(1, matrices - sum(p.numel() for p in model.get_input_embeddings().parameters()))


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Whether a model's config promises full attention in every layer, by torch's own function (sdpa)."""
    layers = getattr(config, "layer_types", None)
    full = set(layers) == {"full_attention"} if layers else not getattr(config, "sliding_window", None)
    return full and getattr(config, "_attn_implementation", None) == "sdpa"


def try_attention(
    model: PreTrainedModel, wanted: AttentionChoice, share_prompts: bool, device: torch.device, dtype: torch.dtype
) -> tuple[PackedAttention, bool]:
    """Choose how a model's rows attend, by trying it: what its kernels or the model do not do right is left out.

    Args:
        model: the model.
        wanted: the option `attention`.
        share_prompts: whether rows with the same prompt may compute it once.
        device: where the model computes.
        dtype: what it computes in.

    Returns:
        What packed rows attend by, and whether prompts are shared.

    Raises:
        ConfigError: what `wanted` names, other than by `"auto"`, does not do.
    """
    chosen = choose_attention(wanted, device, dtype)
    share_prompts = share_prompts and not find_length_dependent(
        model
    )  # rows of several lengths would share a prompt's positions
    if chosen.trees:
        expect_graphs()
    rows = chosen.rows if chosen.rows and _computes_the_same(model, dtype, chosen, "rows") else None
    trees = chosen.trees if share_prompts and chosen.trees and can_share_prompts(model, dtype, chosen) else None
    if wanted != "auto" and (rows != chosen.rows or (share_prompts and trees != chosen.trees)):
        failed = chosen.rows if rows != chosen.rows else chosen.trees
        raise ConfigError(
            f"attention={wanted}: {type(model).__name__} does not compute the same by {failed} as by "
            f"{PADDED_ATTENTION}, or not at all (the log says which); use attention=auto"
        )
    found = PackedAttention(rows, trees)
    return found, share_prompts and (trees is not None or can_share_prompts(model, dtype, found))


def can_share_prompts(
    model: PreTrainedModel, dtype: torch.dtype | None = None, attention: PackedAttention = PADDED
) -> bool:
    """Whether the model takes positions and an attention mask as a tree of rows needs them.

    The config must promise full attention in every layer; then two short rows must score the same as a tree and apart,
    but for the rounding of the dtype it computes in, and other than where the second row sees the first. A recurrent
    model or one that derives positions from elsewhere fails that.

    Args:
        model: the model.
        dtype: what it computes in; None: the dtype of its parameters.
        attention: what packed trees attend by; if it has nothing for them, a padded one is tried.
    """
    return _computes_the_same(model, dtype or model.dtype, attention, "trees")


def _computes_the_same(
    model: PreTrainedModel, dtype: torch.dtype, attention: PackedAttention, what: Literal["rows", "trees"]
) -> bool:
    """Whether rows score the same as `what`, packed as `attention` says, and apart; see `can_share_prompts`."""
    config = model.config.get_text_config()
    if not attends_to_all(config):
        return False
    kernel = attention.rows if what == "rows" else attention.trees
    level, said = (logging.WARNING, kernel) if kernel else (logging.DEBUG, f"{PADDED_ATTENTION} with a mask")
    try:
        long = BLOCK if model.device.type == "cuda" else 3
        difference, mistake = _probe(model, config.vocab_size, attention, what, long)
    except Exception as error:
        logger.log(level, "%s are not computed by %s: %s: %s", what, said, type(error).__name__, error)
        logger.debug("the same with where it was raised", exc_info=True)
        return False
    finally:
        attend_by(model, PADDED_ATTENTION)
    if not (difference <= TOLERANCE.get(dtype, 0.0) and CLEARLY * difference <= mistake):
        logger.log(level, "%s are not computed by %s: %g off, and %g if mixed up", what, said, difference, mistake)
        return False
    return True


@torch.no_grad()
def _probe(
    model: PreTrainedModel, vocabulary: int, attention: PackedAttention, what: Literal["rows", "trees"], long: int
) -> tuple[float, float]:
    """Largest difference of a logprob of two rows apart and, first, as `what`; second, as one row.

    The first row's response has `long` tokens: below a block `flex_attention` has other kernels on a GPU than it
    trains by.
    """
    prompt, first, second = [1, 2, 3, 4], list(range(12, 12 + long)), [8, 9, 10, 11]
    has_values = hasattr(model, VALUE_HEAD)
    outputs = Outputs(logprobs=not has_values, values=has_values)

    def scores(
        tokens: list[int], prompts: list[tuple[int, int]], offsets: list[int], trees: list[Tree], packed: bool = False
    ) -> torch.Tensor:
        mask = np.ones(len(tokens), dtype=bool)
        for begin, end in prompts:
            mask[begin:end] = False
        layout = lay_out(BatchRows.from_offsets(np.array(offsets), mask), trees, packed)
        given = model_input(layout, np.array(tokens) % vocabulary, model.device, attention)
        (column,) = packed_token_outputs(model, given, outputs).values()  # of the responses
        return column

    one = 4 + long
    both = [*prompt, *first, *prompt, *second], [(0, 4), (one, one + 4)], [0, one, one + 8]
    rows = [Tree((0,), 0, one - 1), Tree((1,), 0, 7)]
    apart = scores(*both, rows)
    if what == "rows":
        found = scores(*both, rows, packed=True)
    else:
        found = scores(*both, [Tree((0, 1), 4, 4 + long - 1 + 3)], packed=attention.trees is not None)
    joined = scores([*prompt, *first, *second], [(0, 4)], [0, one + 4], [Tree((0,), 0, one + 3)])
    return float((apart - found).abs().max()), float((apart[long:] - joined[long:]).abs().max())
