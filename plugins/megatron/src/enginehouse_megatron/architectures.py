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

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ModelError
from enginehouse.plugin.records import resolve
from enginehouse_megatron.check_model import named_architecture
from enginehouse_megatron.forms import Form, Grouped, Stacked, Whole
from enginehouse_torch.modeling.holding import Holding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from enginehouse.engines.model import ModelSpec

OF_AN_ARCHITECTURE = (
    "the architecture",
    "add them to `weights` of its Architecture (enginehouse_megatron.architectures), or name another one",
)
LAYER = "model.layers.{layer}."
DECODER = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of megatron-core's `GPTModel` under its Hugging Face names.

    Attributes:
        weights: by megatron-core's name of a parameter, how it is stored; `{layer}` for the number of the layer, and
            `{expert}` for that of the expert.
        settings: arguments of `TransformerConfig` beside those that every config of transformers tells.
        experts: of a mixture of experts, those that its config of transformers tells of them; None: it has none.
    """

    weights: Mapping[str, Form]
    settings: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[PreTrainedConfig], Mapping[str, Any]] | None = None

    def reads(self, stored: Set[str], layers: int) -> frozenset[str]:
        """Pick of a directory's tensors those that the architecture names.

        Args:
            stored: their names.
            layers: how many layers the model has.
        """
        named = {name for form in self.weights.values() for name in form.stored}
        layouts = [re.escape(name).replace(r"\{layer\}", r"(\d+)").replace(r"\{expert\}", r"\d+") for name in named]
        found = ((name, [re.fullmatch(layout, name) for layout in layouts]) for name in stored)
        return frozenset(
            name for name, fits in found for fit in fits if fit and all(int(layer) < layers for layer in fit.groups())
        )

    def held(self, spec: ModelSpec, read: Set[str], *, tied: bool) -> Holding:
        """Hold what is read of a model's directory against it.

        Args:
            spec: the model.
            read: names of the stored tensors that the ranks read.
            tied: whether its embedding is its output layer, too.

        Raises:
            ModelError: it holds others that are part of the same model.
        """
        (head,) = self.weights["output_layer.weight"].stored
        (embedding,) = self.weights["embedding.word_embeddings.weight"].stored
        value = spec.head == "value"
        return Holding.of_names(
            spec, read, {head: embedding} if tied and not value else {}, {head} if value else set(), OF_AN_ARCHITECTURE
        )


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


def _experts_of_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    sparse = [layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers]
    if not any(sparse):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # A softmax over the chosen experts alone is that over all of them, normalised once more.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": 1 if all(sparse) else [int(one) for one in sparse],
    }


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Form]:
    """How a layer with experts is stored, under the names of its block and of an expert's matrices."""
    expert = f"{LAYER}{block}.experts.{{expert}}."
    return {
        f"{DECODER}pre_mlp_layernorm.weight": Whole(f"{LAYER}post_attention_layernorm.weight", split=None),
        f"{DECODER}mlp.router.weight": Whole(f"{LAYER}{block}.gate.weight", split=None),
        f"{DECODER}mlp.experts.linear_fc1.weight{{expert}}": Stacked(
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"), split=None
        ),
        f"{DECODER}mlp.experts.linear_fc2.weight{{expert}}": Whole(f"{expert}{down}.weight", split=None),
    }


QWEN3_MOE = Architecture(
    weights={**QWEN3.weights, **_experts("mlp", "gate_proj", "up_proj", "down_proj")},
    settings=QWEN3.settings,
    experts=_experts_of_qwen3,
)
"""Yang et al. 2025: some layers, or all, with experts in place of Qwen3's feed-forward part."""


def _experts_of_mixtral(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
    }


MIXTRAL = Architecture(
    weights={**LLAMA.weights, **_experts("block_sparse_moe", "w1", "w3", "w2")}, experts=_experts_of_mixtral
)
"""Jiang et al. 2024: Llama's with experts in every layer."""


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
