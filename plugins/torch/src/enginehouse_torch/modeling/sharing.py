"""Decides if a model may compute a shared prompt once and pack rows, and states attention's cost for `packing`."""

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
    AttentionChoices,
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
"""Largest difference of a logprob that rounding explains: in bfloat16, two rounding steps of logits from 16 to 32."""

CLEARLY = 10.0
"""Factor by which a wrong mask must change the outputs more than packing rows, or laying them out as a tree, does."""

MASK_ELEMENT = 2e5
"""Multiplications that a GPU could do while its host writes an element of a dense mask, in about 3 ns. An estimate for
an H100 in bfloat16, not measured. On a CPU it is close to 0."""


def mask_cost(model: PreTrainedModel, attention: AttentionChoices, device: torch.device) -> float | None:
    """Return the cost of an element of a tree's mask, in the unit of `attention_cost`; None: there are no masks."""
    if attention.trees:
        return None
    return 0.0 if device.type == "cpu" else MASK_ELEMENT / _multiplications(model)


def attention_cost(model: PreTrainedModel) -> float:
    """Return the number of multiplications for attending to one token, as a fraction of the number of multiplications
    in the matrix products of one token."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * heads * head_size / _multiplications(model)


def _multiplications(model: PreTrainedModel) -> int:
    """Return the number of multiplications of one token in the matrix products of a forward pass."""
    matrices = sum(p.numel() for p in model.base_model.parameters() if p.dim() > 1)
    return max(1, matrices - sum(p.numel() for p in model.get_input_embeddings().parameters()))


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Return True if a model's config promises full attention in every layer, by torch's own function (sdpa)."""
    layers = getattr(config, "layer_types", None)
    full = set(layers) == {"full_attention"} if layers else not getattr(config, "sliding_window", None)
    return full and getattr(config, "_attn_implementation", None) == "sdpa"


def try_attention(
    model: PreTrainedModel, wanted: AttentionChoice, share_prompts: bool, device: torch.device, dtype: torch.dtype
) -> tuple[AttentionChoices, bool]:
    """Choose a model's attention for the option `wanted`, without functions that give this model other results.

    Returns:
        The attention of packed rows, and whether prompts are shared.

    Raises:
        ConfigError: `wanted` names a function that does not work for this model.
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
            f"attention={wanted}: {type(model).__name__} has other results with {failed} than with "
            f"{PADDED_ATTENTION}, or fails with it (see the log); use attention=auto"
        )
    attention = AttentionChoices(rows, trees)
    return attention, share_prompts and (trees is not None or can_share_prompts(model, dtype, attention))


def can_share_prompts(
    model: PreTrainedModel, dtype: torch.dtype | None = None, attention: AttentionChoices = PADDED
) -> bool:
    """Return True if the model respects positions and an attention mask, as a tree of rows needs.

    The config must promise full attention in every layer. Two short rows must get the same outputs in a tree as
    separately, up to the rounding of `dtype` (None: the parameters' dtype), and other outputs if the second row attends
    to the first. A recurrent model fails this check, and so does a model that ignores the given positions. If
    `attention` has no function for trees, the tree is padded.
    """
    return _computes_the_same(model, dtype or model.dtype, attention, "trees")


def _computes_the_same(
    model: PreTrainedModel, dtype: torch.dtype, attention: AttentionChoices, what: Literal["rows", "trees"]
) -> bool:
    """Return True if packed rows (`what="rows"`), or rows laid out as trees (`"trees"`), get the outputs of separate
    rows.

    `attention` has the attention functions of packed rows and trees.
    """
    config = model.config.get_text_config()
    if not attends_to_all(config):
        return False
    kernel = attention.rows if what == "rows" else attention.trees
    level, label = (logging.WARNING, kernel) if kernel else (logging.DEBUG, f"{PADDED_ATTENTION} with a mask")
    try:
        response_tokens = BLOCK if model.device.type == "cuda" else 3
        difference, mistake = _probe(model, config.vocab_size, attention, what, response_tokens)
    except Exception as error:
        logger.log(level, "%s are not computed by %s: %s: %s", what, label, type(error).__name__, error)
        logger.debug("the traceback of this error", exc_info=True)
        return False
    finally:
        attend_by(model, PADDED_ATTENTION)
    if not (difference <= TOLERANCE.get(dtype, 0.0) and CLEARLY * difference <= mistake):
        logger.log(level, "%s are not computed by %s: wrong by %g, mixed rows by %g", what, label, difference, mistake)
        return False
    return True


@torch.no_grad()
def _probe(
    model: PreTrainedModel, vocabulary: int, attention: AttentionChoices, what: Literal["rows", "trees"], long: int
) -> tuple[float, float]:
    """Compare the logprobs of two separate rows with the logprobs of the same rows packed or as a tree (`what`).

    Return the largest difference. Also return the largest difference from the logprobs of both rows joined to one row,
    which a wrong mask would give.

    The first row's response has `long` tokens. On a GPU it must fill a block, because `flex_attention` uses other
    kernels for less than one block.
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
        inputs = model_input(layout, np.array(tokens) % vocabulary, model.device, attention)
        (column,) = packed_token_outputs(model, inputs, outputs).values()  # of the responses
        return column

    length = 4 + long  # of the first row
    both = [*prompt, *first, *prompt, *second], [(0, 4), (length, length + 4)], [0, length, length + 8]
    rows = [Tree((0,), 0, length - 1), Tree((1,), 0, 7)]
    apart = scores(*both, rows)
    if what == "rows":
        together = scores(*both, rows, packed=True)
    else:
        together = scores(*both, [Tree((0, 1), 4, 4 + long - 1 + 3)], packed=attention.trees is not None)
    joined = scores([*prompt, *first, *second], [(0, 4)], [0, length + 4], [Tree((0,), 0, length + 3)])
    return float((apart - together).abs().max()), float((apart[long:] - joined[long:]).abs().max())
