"""Whether a model may compute a shared prompt once, and what attention costs it. See `packing`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from enginehouse.engines.train import Outputs
from enginehouse.modeling.heads import ModelInput, token_outputs
from enginehouse.modeling.loading import VALUE_HEAD
from enginehouse.modeling.packing import Rows, Tree, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a logprob that rounding explains."""


def attention_cost(model: PreTrainedModel) -> float:
    """Multiplications of one token attending to one other, relative to those of one token's matrix products."""
    config = model.config.get_text_config()
    matrices = sum(p.numel() for p in model.base_model.parameters() if p.dim() > 1)
    matrices -= sum(p.numel() for p in model.get_input_embeddings().parameters())
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * heads * head_size / max(matrices, 1)


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Whether a model's config promises full attention in every layer, by torch's own function (sdpa)."""
    layers = getattr(config, "layer_types", None)
    full = set(layers) == {"full_attention"} if layers else not getattr(config, "sliding_window", None)
    return full and getattr(config, "_attn_implementation", None) == "sdpa"


def can_share_prompts(model: PreTrainedModel, dtype: torch.dtype | None = None) -> bool:
    """Whether the model takes positions and an attention mask as a tree of rows needs them.

    The config must promise full attention in every layer; then two short rows must score the same as a tree and apart,
    but for the rounding of the dtype it computes in. A recurrent model or one that derives positions from elsewhere
    fails that.

    Args:
        model: the model.
        dtype: what it computes in; None: the dtype of its parameters.
    """
    config = model.config.get_text_config()
    if not attends_to_all(config):
        return False
    try:
        difference = _probe(model, config.vocab_size)
    except Exception:
        logger.debug("prompts are not shared: the model refuses a tree of rows", exc_info=True)
        return False
    if not difference <= TOLERANCE.get(dtype or model.dtype, 0.0):
        logger.debug("prompts are not shared: a tree of rows scores %g differently", difference)
        return False
    return True


@torch.no_grad()
def _probe(model: PreTrainedModel, vocabulary: int) -> float:
    """Largest difference of a logprob between two rows apart and the same rows as a tree."""
    prompt, first, second = [1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]
    ids = np.array([*prompt, *first, *prompt, *second]) % vocabulary
    offsets = np.array([0, 7, 15])
    mask = np.ones(15, dtype=bool)
    mask[0:4] = mask[7:11] = False
    rows = Rows.of(offsets, mask)
    has_values = hasattr(model, VALUE_HEAD)
    outputs = Outputs(logprobs=not has_values, values=has_values)
    scores = []
    for trees in ([Tree((0,), 0, 6), Tree((1,), 0, 7)], [Tree((0, 1), 4, 4 + 2 + 3)]):
        layout = lay_out(rows, trees)
        (column,) = token_outputs(model, ModelInput.of(layout, ids, model.device), outputs).values()
        scores.append(column)
    return float((scores[0] - scores[1]).abs().max())
