"""How a server of ours is started: SGLang's arguments and environment, from the options of the backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from enginehouse.engines.model import ModelSpec, ProcessContext, served_positions
from enginehouse.engines.weights import DTYPE_BYTES
from enginehouse_sglang.loader import LOADER
from enginehouse_sglang.options import CPU_KV_CACHE_MIB, SGLangOptions

CONTEXT_MARGIN = 8
"""Tokens by which SGLang's context must be longer than the longest sequence: it keeps some to itself (1 of the context,
5 of a prompt, 1 of what is drawn: its `tp_worker.py` and `scheduler.py`)."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are directories
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin; requests are checked against the model's own
}

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable with the cores of each rank on a CPU. Unset, it has no more ranks than the host has NUMA nodes."""


def environment(options: SGLangOptions, context: ProcessContext) -> dict[str, str]:
    """Variables of the server's processes, beside those of the worker."""
    found = dict(ENVIRONMENT)
    if context.device == "cpu" and options.tensor_parallel > 1 and BINDING not in os.environ:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        found[BINDING] = "|".join([cores] * options.tensor_parallel)
    return found


def server_arguments(
    model: ModelSpec, config: Mapping[str, Any], options: SGLangOptions, context: ProcessContext, has_tokenizer: bool
) -> dict[str, Any]:
    """SGLang's arguments, by name, but for its address, keys and weight version.

    Args:
        model: what to serve.
        config: its `config.json`.
        options: of the backend.
        context: where the worker stands.
        has_tokenizer: whether the model has one.
    """
    text = config.get("text_config", config)
    longest = options.max_model_tokens or served_positions(config)
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.dtype,
        "device": context.device,
        "trust_remote_code": model.trust_remote_code,
        "skip_tokenizer_init": not has_tokenizer,
        "random_seed": context.seed % 2**31,
        "context_length": longest + CONTEXT_MARGIN if longest else None,
        "max_running_requests": options.max_running,
        "tp_size": options.tensor_parallel,
        "enable_deterministic_inference": options.for_device(context.device).deterministic,
        "custom_weight_loader": [LOADER],
        "skip_server_warmup": True,  # the launch generates a token itself
        "log_level": "warning",
    }
    mib = options.kv_cache_mib or (CPU_KV_CACHE_MIB if context.device == "cpu" else None)
    if mib is not None:
        least = 2 * (longest + CONTEXT_MARGIN) if longest else 0
        arguments["max_total_tokens"] = max((mib << 20) // _token_bytes(text, model, options.tensor_parallel), least)
    if context.device == "cpu":
        arguments["attention_backend"] = "torch_native"
    elif context.takes_turns:
        arguments["enable_memory_saver"] = True
    return arguments | {name.replace("-", "_"): value for name, value in options.native.items()}


def _token_bytes(config: Mapping[str, Any], model: ModelSpec, ranks: int) -> int:
    """Bytes of a token's keys and values on one rank, of attention as in Llama."""
    heads = int(config.get("num_attention_heads") or 1)
    width = int(config.get("head_dim") or int(config.get("hidden_size") or heads) // heads)
    pairs = max(int(config.get("num_key_value_heads") or heads) // ranks, 1)
    return 2 * int(config.get("num_hidden_layers") or 1) * pairs * width * DTYPE_BYTES[model.dtype]
