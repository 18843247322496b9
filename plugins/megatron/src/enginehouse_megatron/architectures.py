"""The models that the engine knows: the names of their parameters in a Hugging Face checkpoint.

A new model is a value of `Architecture`, here or anywhere:

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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ModelError
from enginehouse.plugin.records import resolve
from enginehouse_megatron.check_model import name_architecture
from enginehouse_megatron.forms import Form, Grouped, Stacked, Whole
from enginehouse_torch.modeling.adapters import choose_layers
from enginehouse_torch.modeling.holding import VALUE_HEAD, Holding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from enginehouse.engines.model import ModelSpec
    from enginehouse.engines.options import LoraOptions

SOURCE_AND_REMEDY = (
    "the architecture",
    "add them to `weights` of its Architecture (enginehouse_megatron.architectures), or use another architecture",
)
LAYER = "model.layers.{layer}."
DECODER = "decoder.layers.{layer}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of megatron-core's `GPTModel` under its Hugging Face names.

    Attributes:
        weights: Form of each parameter by megatron-core's name, with `{layer}` and `{expert}` for the numbers of the
            layer and the expert.
        settings: Arguments of `TransformerConfig` that transformers' config does not determine.
        experts: Returns further arguments from transformers' config of a mixture of experts; None for other models.
    """

    weights: Mapping[str, Form]
    settings: Mapping[str, Any] = field(default_factory=dict)
    experts: Callable[[PreTrainedConfig], Mapping[str, Any]] | None = None

    def reads(self, stored: Set[str], layers: int) -> frozenset[str]:
        """Return the tensors among `stored` that the architecture names, in a model with `layers` layers."""
        named = {name for form in self.weights.values() for name in form.stored}
        layouts = [re.escape(name).replace(r"\{layer\}", r"(\d+)").replace(r"\{expert\}", r"\d+") for name in named]
        matches = ((name, re.fullmatch(layout, name)) for name in stored for layout in layouts)
        return frozenset(
            name for name, match in matches if match and all(int(layer) < layers for layer in match.groups())
        )

    def choose_layers(
        self, lora: LoraOptions, shapes: Mapping[str, Sequence[int]], config: PreTrainedConfig
    ) -> list[str]:
        """Return the full names of the layers that `lora.targets` chooses.

        Args:
            shapes: The shape of each stored tensor of the architecture, by name.
            config: transformers' config of the model.

        Raises:
            ConfigError: A target is not a linear layer of the model, or is smaller than the rank.
        """
        (output,) = self.weights["output_layer.weight"].stored
        (embedding,) = self.weights["embedding.word_embeddings.weight"].stored
        return choose_layers(
            lora,
            {
                name.removesuffix(".weight"): shape
                for name, shape in shapes.items()
                if len(shape) == 2 and name not in (output, embedding, f"{VALUE_HEAD}.weight")
            },
            engine="megatron",
            model=(config.architectures or [config.model_type])[0],
        )

    def held(self, spec: ModelSpec, read: Set[str], *, tied: bool) -> Holding:
        """Compare the tensors in a model's directory with `read`, the names of the tensors that the ranks read.

        Raises:
            ModelError: The directory holds unread tensors that belong to the same model.
        """
        (head,) = self.weights["output_layer.weight"].stored
        (embedding,) = self.weights["embedding.word_embeddings.weight"].stored
        value = spec.head == "value"
        return Holding.from_names(
            spec, read, {head: embedding} if tied and not value else {}, {head} if value else set(), SOURCE_AND_REMEDY
        )


LLAMA = Architecture(
    weights={
        "embedding.word_embeddings.weight": Whole("model.embed_tokens.weight", split=0),
        f"{DECODER}self_attention.linear_qkv.layer_norm_weight": Whole(f"{LAYER}input_layernorm.weight", split=None),
        f"{DECODER}self_attention.linear_qkv.weight": Grouped(
            tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
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
            tuple(f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv")
        ),
    },
    settings={"add_qkv_bias": True},
)
"""Yang et al. 2024: Llama with biases of queries, keys and values."""

QWEN3 = Architecture(
    weights={
        **LLAMA.weights,
        f"{DECODER}self_attention.q_layernorm.weight": Whole(f"{LAYER}self_attn.q_norm.weight", split=None),
        f"{DECODER}self_attention.k_layernorm.weight": Whole(f"{LAYER}self_attn.k_norm.weight", split=None),
    },
    settings={"qk_layernorm": True},
)
"""Yang et al. 2025: Llama with norms of each head's queries and keys."""


def _experts_of_qwen3(config: PreTrainedConfig) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    sparse = [layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers]
    if not any(sparse):
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        # A softmax over the chosen experts equals the softmax over all experts, renormalised over the chosen ones.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": 1 if all(sparse) else [int(has_experts) for has_experts in sparse],
    }


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, Form]:
    """Return the forms of a layer with experts, from the names of its block and of an expert's matrices."""
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
"""Yang et al. 2025: Qwen3 with experts in place of the feed-forward part of some layers, or of all."""


def _experts_of_mixtral(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
    }


MIXTRAL = Architecture(
    weights={**LLAMA.weights, **_experts("block_sparse_moe", "w1", "w3", "w2")}, experts=_experts_of_mixtral
)
"""Jiang et al. 2024: Llama with experts in every layer."""


def find_architecture(model_type: str, option: str) -> Architecture:
    """Return the architecture of a model, by its config.json or by the option `architecture`.

    Raises:
        ModelError: No architecture is known; the message says what to write.
        ResolveError: The option names an object that does not exist.
    """
    architecture = resolve(name_architecture(model_type, option))
    if not isinstance(architecture, Architecture):
        raise ModelError(f"megatron: architecture={option!r} is a {type(architecture).__name__}, not an Architecture")
    return architecture
