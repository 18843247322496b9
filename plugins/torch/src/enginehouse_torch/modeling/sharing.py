"""Whether a model may compute a shared prompt once, and what attention costs it. See `packing`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from enginehouse.engines.train import Outputs
from enginehouse_torch.modeling.heads import ModelInput, token_outputs
from enginehouse_torch.modeling.loading import VALUE_HEAD
from enginehouse_torch.modeling.packing import Rows, Tree, lay_out

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a logprob that rounding explains: of bfloat16, two steps between logits of 16 to 32."""

CLEARLY = 10.0
"""How many times nearer a tree must come to the rows apart than the mistake that it is looked at for would."""


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
    but for the rounding of the dtype it computes in, and other than where the second row sees the first. A recurrent
    model or one that derives positions from elsewhere fails that.

    Args:
        model: the model.
        dtype: what it computes in; None: the dtype of its parameters.
    """
    config = model.config.get_text_config()
    if not attends_to_all(config):
        return False
    try:
        difference, mistake = _probe(model, config.vocab_size)
    except Exception:
        logger.debug("prompts are not shared: the model refuses a tree of rows", exc_info=True)
        return False
    if not (difference <= TOLERANCE.get(dtype or model.dtype, 0.0) and CLEARLY * difference <= mistake):
        logger.debug("prompts are not shared: a tree of rows scores %g differently, a row %g", difference, mistake)
        return False
    return True


@torch.no_grad()
def _probe(model: PreTrainedModel, vocabulary: int) -> tuple[float, float]:
    """Largest difference of a logprob of two rows apart and, first, the same rows as a tree; second, as one row."""
    prompt, first, second = [1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]
    has_values = hasattr(model, VALUE_HEAD)
    outputs = Outputs(logprobs=not has_values, values=has_values)

    def scores(
        tokens: list[int], prompts: list[tuple[int, int]], offsets: list[int], trees: list[Tree]
    ) -> torch.Tensor:
        mask = np.ones(len(tokens), dtype=bool)
        for begin, end in prompts:
            mask[begin:end] = False
        layout = lay_out(Rows.of(np.array(offsets), mask), trees)
        given = ModelInput.of(layout, np.array(tokens) % vocabulary, model.device)
        (column,) = token_outputs(model, given, outputs).values()  # of the responses
        return column

    both = [*prompt, *first, *prompt, *second], [(0, 4), (7, 11)], [0, 7, 15]
    apart = scores(*both, [Tree((0,), 0, 6), Tree((1,), 0, 7)])
    shared = scores(*both, [Tree((0, 1), 4, 4 + 2 + 3)])
    joined = scores([*prompt, *first, *second], [(0, 4)], [0, 11], [Tree((0,), 0, 10)])
    return float((apart - shared).abs().max()), float((apart[3:] - joined[3:]).abs().max())
