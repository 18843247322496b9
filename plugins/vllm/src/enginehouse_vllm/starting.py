"""Starts vLLM's engine, with arguments and environment from the options of the backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.engines.model import TOKENIZER_FILES, ModelSpec, ProcessContext
from enginehouse.errors import ConfigError, ModelError
from enginehouse_vllm.last_words import HERE, last_words
from enginehouse_vllm.options import CPU_KV_CACHE_MIB, SHARE_IN_TURNS, V2_RUNNER, VLLMOptions
from enginehouse_vllm.orphans import LAUNCHER
from enginehouse_vllm.served_adapter import adapter_arguments

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs, AsyncLLMEngine

TAKING_TURNS: Mapping[str, Any] = {"enable_sleep_mode": True, "gpu_memory_utilization": SHARE_IN_TURNS}
"""Further arguments on a GPU that roles use in turns. vLLM starts only if the fraction `gpu_memory_utilization` of the
GPU's memory is free. The rest holds what other roles cannot free: contexts of CUDA, buffers of NCCL."""

TRUNCATION = "enginehouse_vllm.truncation"
"""Module that vLLM loads in its own processes, by this name."""

QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""vLLM's names of quantizations."""

CPU_WORKER = "enginehouse_vllm.cpu_worker.SleepingCPUWorker"
"""Class that vLLM makes in its own processes, by this name."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # the worker's own log, which errors quote
    "HF_HUB_OFFLINE": "1",  # models are directories
    "PYTHONSAFEPATH": "1",  # it inspects a model by `python -m`, which imports from the current directory first
}
"""Variables that are set before vLLM is imported, unless the user has set them."""

CPU_ENVIRONMENT = {
    # Without it vLLM's CPU platform puts the model into a third process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # `enforce_eager` leaves torch.compile on in the sampler, which costs a C++ compiler and seconds at the first call.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM binds each engine to cores of its own choice: two engines on a machine would choose the same.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Model Runner V2 has no place for the notes that logprobs under top-k and top-p need (`truncation.py`).
    V2_RUNNER: "0",
    # Threads of several processes on the same cores wait for each other at every barrier: 2 to 20 times slower.
    "OMP_NUM_THREADS": "1",
}
"""Further variables on a CPU."""


def set_environment(device: str) -> None:
    """Set the variables of vLLM's processes, before vLLM is imported."""
    for name, value in (ENVIRONMENT | (CPU_ENVIRONMENT if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCHER] = str(os.getpid())


def has_exact_logprobs() -> bool:
    """Return True if vLLM runs models by Model Runner V1, which can note the probability of kept tokens."""
    return os.environ.get(V2_RUNNER) == "0"


def has_tokenizer(model: ModelSpec) -> bool:
    """Return True if a model's directory has a tokenizer."""
    return any(any(Path(model.path).glob(pattern)) for pattern in TOKENIZER_FILES)


def engine_arguments(
    path: str, model: ModelSpec, options: VLLMOptions, context: ProcessContext, matrices: Iterable[str] = ()
) -> dict[str, Any]:
    """Return vLLM's arguments for the model at `path`, whose adapter may have `matrices`."""
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "seed": context.seed % 2**31,  # NumPy takes no more than 32 bits
        "max_num_seqs": options.max_running,
        "tensor_parallel_size": options.tensor_parallel,
        "logprobs_mode": "processed_logprobs",  # after the temperature: what a trainer computes
        "skip_tokenizer_init": not has_tokenizer(model),
        "disable_log_stats": True,  # vLLM's own logging; `Statistics` is passed separately
        "weight_transfer_config": {"backend": "enginehouse"},
    }
    if has_exact_logprobs():
        arguments["logits_processors"] = [f"{TRUNCATION}:NotesKeptProbability"]
        arguments["worker_extension_cls"] = f"{TRUNCATION}.WorkerExtension"
    if options.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside a Ray worker vLLM would take Ray, on CPU in vain
    if options.quantizes():
        arguments["quantization"] = QUANTIZATIONS[options.quantization]
    if options.max_model_tokens is not None:
        arguments["max_model_len"] = options.max_model_tokens
    if context.device == "cpu":
        arguments["worker_cls"] = CPU_WORKER
        arguments["enforce_eager"] = True
        # torch's CPU generators cannot go back, so a seeded request with a chunked prompt ends vLLM's engine.
        arguments["enable_chunked_prefill"] = False
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_MIB << 20
    elif context.takes_turns:
        arguments |= TAKING_TURNS
    if options.kv_cache_mib is not None:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_mib << 20
    if model.adapter is not None:
        arguments |= adapter_arguments(model.adapter, matrices)
    return arguments | options.native


def start_engine(
    arguments: Mapping[str, Any], stat_logger: Any, model: ModelSpec, where: str
) -> tuple[AsyncLLMEngine, AsyncEngineArgs]:
    """Start vLLM's engine, and return it with its arguments.

    Raises:
        ModelError: vLLM cannot load the model or run it on this device.
        ConfigError: vLLM rejects an argument of `native`.
    """
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    try:
        engine_args = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise ConfigError(f"vllm rejects an argument of `native`: {error}") from error
    try:
        return AsyncLLMEngine.from_engine_args(engine_args, stat_loggers=[stat_logger]), engine_args
    except Exception as error:
        reason = ""
        if "ngine core" in str(error):  # it died, and its log has the reason
            reason = last_words()
        elif "check the logs" in str(error):  # a model's class cannot be imported
            reason = last_words(process=HERE)
        raise ModelError(
            f"{where}: vllm cannot serve {model.path!r}: {reason or f'{type(error).__name__}: {error}'}"
        ) from error
