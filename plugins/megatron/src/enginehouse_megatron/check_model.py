"""Whether a model fits: its architecture is known, and the layout divides it. Light: a config is checked with it.

The engine asks the same, of the config with all defaults, and more (`build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from enginehouse.engines.options import check_divides
from enginehouse.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from enginehouse_megatron.options import MegatronOptions

ARCHITECTURES = {
    name: f"enginehouse_megatron.architectures:{name.upper()}"
    for name in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
}
"""The architectures that come along, by `model_type` in config.json."""


def named_architecture(model_type: str, asked: str) -> str:
    """Where the architecture of a model is, as `"module:NAME"`.

    Args:
        model_type: as in its config.json.
        asked: the option `architecture`.

    Raises:
        ModelError: there is none for the model; the message says what to write.
    """
    if asked != "auto":
        if ":" not in asked:
            known = ": its model_type is known, leave the option at auto" if asked in ARCHITECTURES else ""
            raise ConfigError(f"megatron: architecture={asked!r} is not module:NAME of an Architecture{known}")
        return asked
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"megatron: no architecture is known for model_type {model_type!r} (known: {', '.join(ARCHITECTURES)}). "
            "Write one: a value of enginehouse_megatron.architectures.Architecture, which maps megatron-core's names "
            "of parameters to those in the checkpoint, and name it as module:NAME in the option `architecture`; if its "
            "weights are called as those of a known one, and it computes as that does, that is enough: architecture="
            "enginehouse_megatron.architectures:LLAMA. Then compare it: `enginehouse parity CONFIG` scores the same "
            "tokens with both engines"
        )
    return ARCHITECTURES[model_type]


def check_divided(config: Mapping[str, Any], options: MegatronOptions) -> None:
    """See that a layout divides a model.

    Args:
        config: the model's; what it does not say is not checked.
        options: the engine's.

    Raises:
        ConfigError: it does not; the message names the nearest value that does.
    """
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    layers = config.get("num_hidden_layers")
    for name, count, ranks, what in (
        ("tensor_parallel", config.get("num_attention_heads"), tensor, "attention heads"),
        ("tensor_parallel", config.get("num_key_value_heads"), tensor, "key-value heads"),
        ("tensor_parallel", config.get("intermediate_size"), tensor, "columns of the feed-forward layers"),
        ("pipeline_parallel", layers, pipeline, "layers"),
        ("virtual_stages", layers and layers // pipeline, options.virtual_stages, "layers of a pipeline rank"),
    ):
        if count:
            check_divides(f"megatron: {name}", ranks, count, f"the model's {count} {what}")


def number_of_experts(config: Mapping[str, Any]) -> int:
    """How many experts a layer has, in a model of an architecture that comes along."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def check_experts(experts: int, options: MegatronOptions) -> None:
    """See that a layout fits a model's experts.

    Args:
        experts: how many a layer has, 0 where there are none.
        options: the engine's.

    Raises:
        ConfigError: it does not; the message says what does.
    """
    if not experts:
        if options.expert_parallel > 1:
            raise ConfigError(
                f"megatron: expert_parallel={options.expert_parallel} shares out experts, and the model has none: "
                "leave it at 1; ranks that no option takes split the rows"
            )
        return
    check_divides("megatron: expert_parallel", options.expert_parallel, experts, f"the model's {experts} experts")
    if options.tensor_parallel > 1 and not options.sequence_parallel:
        raise ConfigError(
            f"megatron: tensor_parallel={options.tensor_parallel} of a model with experts needs "
            "sequence_parallel=true: else each rank would send the same tokens to the experts"
        )


def check_router(config: Mapping[str, Any]) -> None:
    """See that megatron-core has a router for a model's experts.

    Raises:
        ModelError: one expert a token, weighed by 1 whatever the router thinks of it.
    """
    weighs_one = config.get("norm_topk_prob", config.get("model_type") == "mixtral")
    if config.get("num_experts_per_tok") == 1 and weighs_one:
        raise ModelError(
            "megatron: the model sends each token to one expert and normalises that one's weight to 1, for which "
            "megatron-core has no router; train it with the backend `fsdp`"
        )
