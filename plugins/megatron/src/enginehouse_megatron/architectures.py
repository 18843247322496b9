"""The models the engine knows: what their parameters are called in a Hugging Face checkpoint.

A new one is a value of `Architecture`, here or anywhere:

    # my_models.py
    from enginehouse_megatron.architectures import Architecture, LLAMA
    from enginehouse_megatron.forms import Whole

    MINE = Architecture(
        weights={**LLAMA.weights, "decoder.layers.{layer}.self_attention.q_layernorm.weight":
                 Whole("model.layers.{layer}.self_attn.query_norm.weight", split=None)},
        settings={"qk_layernorm": True},
    )

with the engine's option `architecture: my_models:MINE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from enginehouse.errors import ModelError
from enginehouse.plugin.records import resolve
from enginehouse_megatron.fitting import named_architecture
from enginehouse_megatron.forms import Form, Grouped, Stacked, Whole

LAYER = "model.layers.{layer}."
DECODER = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of megatron-core's `GPTModel` under its Hugging Face names.

    Attributes:
        weights: by megatron-core's name of a parameter, how it is stored; `{layer}` for the number of the layer.
        settings: arguments of `TransformerConfig` beside those that every config of transformers tells.
    """

    weights: Mapping[str, Form]
    settings: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Architecture(
    weights={
        "embedding.word_embeddings.weight": Whole("model.embed_tokens.weight", split=0),
        f"{DECODER}self_attention.linear_qkv.layer_norm_weight": Whole(f"{LAYER}input_layernorm.weight", split=None),
        f"{DECODER}self_attention.linear_qkv.weight": Grouped(
            tuple(f"{LAYER}self_attn.{one}_proj.weight" for one in "qkv")
        ),
        f"{DECODER}self_attention.linear_proj.weight": Whole(f"{LAYER}self_attn.o_proj.weight", split=1),
        f"{DECODER}mlp.linear_fc1.layer_norm_weight": Whole(f"{LAYER}post_attention_layernorm.weight", split=None),
        f"{DECODER}mlp.linear_fc1.weight": Stacked((f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight")),
        f"{DECODER}mlp.linear_fc2.weight": Whole(f"{LAYER}mlp.down_proj.weight", split=1),
        "decoder.final_layernorm.weight": Whole("model.norm.weight", split=None),
        "output_layer.weight": Whole("lm_head.weight", split=0),
    }
)
"""Touvron et al. 2023."""

QWEN2 = Architecture(
    weights={
        **LLAMA.weights,
        f"{DECODER}self_attention.linear_qkv.bias": Grouped(
            tuple(f"{LAYER}self_attn.{one}_proj.bias" for one in "qkv")
        ),
    },
    settings={"add_qkv_bias": True},
)
"""Yang et al. 2024: Llama's with biases of queries, keys and values."""

QWEN3 = Architecture(
    weights={
        **LLAMA.weights,
        f"{DECODER}self_attention.q_layernorm.weight": Whole(f"{LAYER}self_attn.q_norm.weight", split=None),
        f"{DECODER}self_attention.k_layernorm.weight": Whole(f"{LAYER}self_attn.k_norm.weight", split=None),
    },
    settings={"qk_layernorm": True},
)
"""Yang et al. 2025: Llama's with norms of each head's queries and keys."""


def architecture_of(model_type: str, asked: str) -> Architecture:
    """The architecture that a model is of.

    Args:
        model_type: as in its config.json.
        asked: the option `architecture`.

    Raises:
        ModelError: there is none for the model; the message says what to write.
        ResolveError: `asked` leads nowhere.
    """
    found = resolve(named_architecture(model_type, asked))
    if not isinstance(found, Architecture):
        raise ModelError(f"megatron: architecture={asked!r} is a {type(found).__name__}, not an Architecture")
    return found
