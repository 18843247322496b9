"""Checks that a model's architecture is known, and that the layout fits its sizes. Light to import, for config checks.

The engine repeats these checks with all defaults of the model's config, and checks more (`build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse.engines.options import adapts_output, check_divides
from enginehouse.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from enginehouse_megatron.options import MegatronOptions

ARCHITECTURES = {
    name: f"enginehouse_megatron.architectures:{name.upper()}"
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
}
"""The built-in architectures, by `model_type` in config.json."""

SCALES = ("_multiplier", "_softcapping", "_softcap", "logits_scaling", "logit_scale")
"""Endings of config keys for factors and limits that no layer here applies (Granite, Gemma, Cohere)."""

PLAIN_ROPE = ("default", "llama3")
"""Kinds of rotary embedding that megatron-core computes as transformers does."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""megatron-core's constants of the kind `llama3` (rotary_pos_embedding.py:97)."""


def name_architecture(model_type: str, option: str) -> str:
    """Return `"module:NAME"` of a model's architecture, by its config.json or by the option `architecture`.

    Raises:
        ModelError: No architecture is known; the message says what to write.
    """
    if option != "auto":
        if ":" not in option:
            hint = ": its model_type is known, leave the option at auto" if option in ARCHITECTURES else ""
            raise ConfigError(f"megatron: architecture={option!r} is not module:NAME of an Architecture{hint}")
        return option
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"megatron: no architecture is known for model_type {model_type!r} (known: {', '.join(ARCHITECTURES)}). "
            "Write one: a value of enginehouse_megatron.architectures.Architecture, which maps megatron-core's names "
            "of parameters to those in the checkpoint, and name it as module:NAME in the option `architecture`. If the "
            "model has the weight names and the computation of a known model, use its architecture, such as "
            "architecture=enginehouse_megatron.architectures:LLAMA. Then compare the engines: `enginehouse parity "
            "CONFIG` scores the same tokens with both"
        )
    return ARCHITECTURES[model_type]


def check_divided(config: Mapping[str, Any], options: MegatronOptions) -> None:
    """Raise `ConfigError`, with the nearest valid value, if an option of the layout does not divide a model's size."""
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    layers = config.get("num_hidden_layers")
    for name, count, ranks, unit in (
        ("tensor_parallel", config.get("num_attention_heads"), tensor, "attention heads"),
        ("tensor_parallel", config.get("num_key_value_heads"), tensor, "key-value heads"),
        ("tensor_parallel", config.get("intermediate_size"), tensor, "columns of the feed-forward layers"),
        ("pipeline_parallel", layers, pipeline, "layers"),
        ("virtual_stages", layers and layers // pipeline, options.virtual_stages, "layers of a pipeline rank"),
    ):
        if count:
            check_divides(f"megatron: {name}", ranks, count, f"the model's {count} {unit}")


def number_of_experts(config: Mapping[str, Any]) -> int:
    """Return the number of a layer's experts, in a model of a built-in architecture."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def check_experts(experts: int, options: MegatronOptions) -> None:
    """Raise `ConfigError` if a layout does not fit a model with `experts` experts in a layer."""
    if not experts:
        if options.expert_parallel > 1:
            raise ConfigError(
                f"megatron: expert_parallel={options.expert_parallel} needs experts, but the model has none: "
                "set it to 1; ranks that no option uses split the rows"
            )
        return
    check_divides("megatron: expert_parallel", options.expert_parallel, experts, f"the model's {experts} experts")
    if options.tensor_parallel > 1 and not options.sequence_parallel:
        raise ConfigError(
            f"megatron: tensor_parallel={options.tensor_parallel} of a model with experts needs "
            "sequence_parallel=true, because otherwise each rank would send the same tokens to the experts"
        )


def check_adapters(experts: int, options: MegatronOptions) -> None:
    """Raise `ConfigError` if adapters are requested where this engine has none."""
    if options.lora is None:
        return
    if experts:
        raise ConfigError(
            "megatron: lora: this engine does not adapt models with experts; use the engine fsdp, which adapts their "
            "linear layers, or leave lora unset"
        )
    if adapts_output(options.lora):
        raise ConfigError(
            "megatron: lora.targets: this engine does not adapt the output layer; leave 'lm_head' out, or use the "
            "engine fsdp"
        )


def check_router(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a model sends each token to one expert with weight 1; megatron-core has no such router."""
    weighs_one = config.get("norm_topk_prob", config.get("model_type") == "mixtral")
    if config.get("num_experts_per_tok") == 1 and weighs_one:
        raise ModelError(
            "megatron: the model sends each token to one expert and normalises the expert's weight to 1; megatron-core "
            "has no such router: train the model with the backend `fsdp`"
        )


def rope_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a config's rotary embeddings, with defaults for the kind and the base."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return rope


def check_known(config: PreTrainedConfig, path: str) -> None:
    """Raise ModelError if a model's config needs something that this engine does not support."""
    rope = rope_of(config)
    unknown = ""
    if rope["rope_type"] not in PLAIN_ROPE:
        unknown = f"rotary embeddings of the kind {rope['rope_type']!r}"
    elif rope["rope_type"] == "llama3" and any(rope.get(name, right) != right for name, right in LLAMA3_ROPE.items()):
        unknown = f"rotary embeddings {rope}"
    elif _attends_within_a_window(config):
        unknown = "attention within a window"
    elif config.hidden_act != "silu":
        unknown = f"the activation {config.hidden_act!r}"
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        unknown = "biases of all linear layers"
    elif getattr(config, "partial_rotary_factor", None) not in (None, 1.0):
        unknown = "rotary embeddings of a part of a head"
    else:
        scales = [name for name in vars(config) if name.endswith(SCALES) and getattr(config, name) not in (None, 1.0)]
        unknown = ", ".join(f"{name}={getattr(config, name)}" for name in scales)
    if unknown:
        raise ModelError(f"megatron: the model in {path!r} has {unknown}, which this engine does not support yet")


def _attends_within_a_window(config: PreTrainedConfig) -> bool:
    layers = getattr(config, "layer_types", None)
    return set(layers) != {"full_attention"} if layers else bool(getattr(config, "sliding_window", None))
