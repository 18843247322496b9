"""Starts an SGLang server for a replica, with arguments and environment from the options of the backend."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import Any

from enginehouse.engines.model import ModelSpec, ProcessContext, served_positions
from enginehouse.engines.weights import DTYPE_BYTES
from enginehouse.errors import ConfigError, EnginehouseError, describe_os_error
from enginehouse_sglang.loader import LOADER
from enginehouse_sglang.options import CPU_KV_CACHE_MIB, SGLangOptions
from enginehouse_sglang.process import ServerProcess, SGLangFailed, find_free_port
from enginehouse_sglang.server import SGLangServer

CONTEXT_MARGIN = 8
"""Tokens by which SGLang's context must be longer than the longest sequence, because SGLang reserves some (1 of the
context, 5 of a prompt, 1 of a response: its `tp_worker.py` and `scheduler.py`)."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # models are directories
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin; requests are checked against the model's own
}

BINDING = "SGLANG_CPU_OMP_THREADS_BIND"
"""SGLang's variable with the cores of each rank on a CPU. If it is unset, each rank needs a NUMA node."""

LOOK_SECONDS = 0.2
"""Interval at which a server that starts is asked whether it is ready."""


async def start_server(arguments: dict[str, Any], options: SGLangOptions, context: ProcessContext) -> SGLangServer:
    """Start a server and return it once it is ready; `arguments` lack its address and keys.

    Raises:
        ConfigError: SGLang rejects an argument of `native`, or this machine does not have the endpoint's address.
        SGLangFailed: The server cannot be started, or dies.
    """
    host = context.node if options.openai_endpoint == "node" else "127.0.0.1"
    try:
        port = find_free_port(host)
    except OSError as error:
        raise ConfigError(f"no OpenAI endpoint can be opened on {host}: {describe_os_error(error)}") from error
    admin_key = secrets.token_urlsafe(24)
    arguments = arguments | {"host": host, "port": port, "admin_api_key": admin_key}
    key = os.environ.get("SGLANG_API_KEY") if options.openai_endpoint else admin_key
    if key:
        arguments["api_key"] = key
    process = ServerProcess(arguments, server_environment(options, context), str(context))
    shown = f"[{host}]" if ":" in host else host
    server = SGLangServer(f"http://{shown}:{port}", str(context), process, key, admin_key)
    try:
        while not await _is_ready(server, process):
            await asyncio.wait([process.died], timeout=LOOK_SECONDS)
    except BaseException:
        await process.end()
        raise
    return server


async def _is_ready(server: SGLangServer, process: ServerProcess) -> bool:
    if not process.is_alive():
        message = process.describe_death()
        if "unrecognized arguments" in message or "error: argument" in message:
            raise ConfigError(f"sglang rejects an argument of `native`: {message}")
        raise SGLangFailed(message)
    try:
        await server.address.call("GET", "/ready")
    except EnginehouseError:
        return False
    return True


def server_environment(options: SGLangOptions, context: ProcessContext) -> dict[str, str]:
    """Return the variables that the server's processes get in addition to the worker's variables."""
    variables = dict(ENVIRONMENT)
    if context.device == "cpu" and options.tensor_parallel > 1 and BINDING not in os.environ:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        variables[BINDING] = "|".join([cores] * options.tensor_parallel)
    return variables


def server_arguments(
    model: ModelSpec, config: Mapping[str, Any], options: SGLangOptions, context: ProcessContext, has_tokenizer: bool
) -> dict[str, Any]:
    """Return SGLang's arguments by name, without its address, keys and weight version; `config` is `config.json`."""
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
        arguments["sleep_on_idle"] = True  # else each idle scheduler takes a core from the trainer and other replicas
    elif context.takes_turns:
        arguments["enable_memory_saver"] = True
    return arguments | {name.replace("-", "_"): value for name, value in options.native.items()}


def _token_bytes(config: Mapping[str, Any], model: ModelSpec, ranks: int) -> int:
    """Return the bytes of a token's keys and values on one rank, if attention is as in Llama."""
    heads = int(config.get("num_attention_heads") or 1)
    width = int(config.get("head_dim") or int(config.get("hidden_size") or heads) // heads)
    pairs = max(int(config.get("num_key_value_heads") or heads) // ranks, 1)
    return 2 * int(config.get("num_hidden_layers") or 1) * pairs * width * DTYPE_BYTES[model.dtype]
