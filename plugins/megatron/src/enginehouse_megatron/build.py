"""Builds this rank's part of a `GPTModel`, with memory for its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from enginehouse_megatron import kernels  # noqa: F401  before all else of megatron-core

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from enginehouse.errors import ConfigError, ModelError
from enginehouse.quiet import quiet_transformers
from enginehouse_megatron.axes import CONTEXT, PIPELINE, TENSOR
from enginehouse_megatron.check_model import (
    check_adapters,
    check_divided,
    check_experts,
    check_known,
    check_router,
    rope_of,
)
from enginehouse_megatron.layers import decoder_layers
from enginehouse_megatron.output_layer import keep_padding, put_value_head, select_positions
from enginehouse_torch.modeling.loading import model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from enginehouse.engines.model import ModelSpec
    from enginehouse_megatron.architectures import Architecture
    from enginehouse_megatron.options import MegatronOptions


def model_config(spec: ModelSpec) -> PreTrainedConfig:
    """Return the model's config; raises `ModelError` if it cannot be read."""
    from transformers import AutoConfig

    path = model_directory(spec)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(
                str(path), trust_remote_code=spec.trust_remote_code, local_files_only=True
            )
    except Exception as error:
        raise ModelError(f"the config of {spec.path!r} cannot be read: {type(error).__name__}: {error}") from error
    text_config: PreTrainedConfig = config.get_text_config()
    return text_config


def transformer_config(
    config: PreTrainedConfig,
    architecture: Architecture,
    spec: ModelSpec,
    options: MegatronOptions,
    sizes: Mapping[str, int],
    device: str,
) -> TransformerConfig:
    """Return megatron-core's config of the model, for a layout with axes of the given `sizes`.

    Raises:
        ModelError: The model needs something that this engine does not support.
        ConfigError: A size of the model is not divisible by the layout, or megatron-core rejects an argument of
            `native`.
    """
    check_known(config, spec.path)
    experts = {} if architecture.experts is None else dict(architecture.experts(config))
    _check_layout(config, options, experts)
    arguments = {
        **_model_arguments(config, spec),
        **_layout_arguments(options, sizes),
        "use_cpu_initialization": device == "cpu",
        "moe_grouped_gemm": bool(experts),  # else transformer-engine's experts have other names
        **architecture.settings,
        **experts,
        **options.native,
    }
    try:
        return TransformerConfig(**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"megatron: TransformerConfig refuses the model or an argument of `native`: {error}"
        ) from error


def _model_arguments(config: PreTrainedConfig, spec: ModelSpec) -> dict[str, Any]:
    dtype = getattr(torch, spec.dtype)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": _key_value_heads(config),
        "kv_channels": _head_size(config),
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,
        "bf16": spec.dtype == "bfloat16",
        "fp16": spec.dtype == "float16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,  # micro-batches differ in length
        "moe_token_dispatcher_type": "alltoall",  # variable lengths require it, in dense models too
        "moe_router_load_balancing_type": "none",  # no engine here adds anything to the requested loss
        "calculate_per_token_loss": True,  # gradients are sums, because their divisor is known only at the step
    }


def _layout_arguments(options: MegatronOptions, sizes: Mapping[str, int]) -> dict[str, Any]:
    recomputes = options.recompute == "full"
    return {
        "tensor_model_parallel_size": sizes[TENSOR],
        "pipeline_model_parallel_size": sizes[PIPELINE],
        "virtual_pipeline_model_parallel_size": options.virtual_stages if options.virtual_stages > 1 else None,
        # With two stages the defaults silently mix up what the stages send to each other.
        "overlap_p2p_comm": options.virtual_stages > 1,
        "batch_p2p_comm": options.virtual_stages == 1,
        "context_parallel_size": sizes[CONTEXT],
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": options.sequence_parallel and sizes[TENSOR] > 1,
        "recompute_granularity": "full" if recomputes else None,
        "recompute_method": "uniform" if recomputes else None,
        "recompute_num_layers": 1 if recomputes else None,
    }


def model_parts(
    config: PreTrainedConfig, settings: TransformerConfig, spec: ModelSpec, device: torch.device
) -> list[GPTModel]:
    """Return this rank's parts of the model, one for each virtual stage, with uninitialised weights.

    In half precision the parts have that dtype, and megatron-core's optimizer has a float32 copy.
    """
    count = settings.virtual_pipeline_model_parallel_size
    return [_build_part(config, settings, spec, device, stage) for stage in ([None] if count is None else range(count))]


def _build_part(
    config: PreTrainedConfig, settings: TransformerConfig, spec: ModelSpec, device: torch.device, stage: int | None
) -> GPTModel:
    rope = rope_of(config)
    size = settings.tensor_model_parallel_size
    model = GPTModel(
        settings,
        decoder_layers(settings, device.type, stage),
        vocab_size=-(-config.vocab_size // size) * size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings) and spec.head == "causal_lm",
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0),
        vp_stage=stage,
    )
    if spec.head == "value":
        put_value_head(model, settings, device)
    select_positions(model, settings)
    keep_padding(model, getattr(config, "pad_token_id", None))
    return model.eval()


def callable_part(model: GPTModel, settings: TransformerConfig) -> torch.nn.Module:
    """Return the model as the schedules call it: it returns float32 even if it computes in half precision."""
    return Float16Module(settings, model) if settings.bf16 or settings.fp16 else model


def _check_layout(config: PreTrainedConfig, options: MegatronOptions, experts: Mapping[str, Any]) -> None:
    """Raise ConfigError if a layout does not fit the model."""
    values = config.to_dict() | {"num_key_value_heads": _key_value_heads(config)}
    if experts and experts.get("moe_layer_freq", 1) == 1:
        values["intermediate_size"] = None  # no layer has a dense feed-forward part
    check_divided(values, options)
    check_experts(experts.get("num_moe_experts", 0), options)
    check_adapters(experts.get("num_moe_experts", 0), options)
    check_router(values if experts else {})
    if isinstance(has_experts := experts.get("moe_layer_freq"), list):
        _check_each_rank_has_experts(has_experts, options)


def _check_each_rank_has_experts(has_experts: Sequence[int], options: MegatronOptions) -> None:
    """Raise ConfigError if all layers of a pipeline rank are dense, because its checkpoint could not be saved.

    distrib_optimizer.py:642 asks every rank's optimizer of experts for its step, which an empty optimizer lacks.
    """
    ranks = options.pipeline_parallel
    each = len(has_experts) // (ranks * options.virtual_stages)
    with_experts = [layer for layer, has in enumerate(has_experts) if has]
    for rank in range(ranks):
        if not any(layer // each % ranks == rank for layer in with_experts):
            raise ConfigError(
                f"megatron: pipeline_parallel={ranks} leaves rank {rank} of a pipeline without a layer that has "
                f"experts (only the layers {with_experts} have experts); use fewer pipeline ranks"
            )


def _key_value_heads(config: PreTrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
