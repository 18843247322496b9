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
            name="sglang",
            summary="SGLang: paged, prefix-caching generation, on CPU or GPU, or servers that run already",
            engine="enginehouse_sglang.engine:SGLangRollout",
            options="enginehouse_sglang.options:SGLangOptions",
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
            requires=("sglang>=0.5.21,<0.6",),
            runtimes={
                "cpu": RequirementSet(
                    lock="enginehouse_sglang:cpu.lock", module="sglang", prepare="enginehouse_sglang.on_cpu:adapt"
                ),
                "cuda": RequirementSet(requirements=("sglang>=0.5.21,<0.6",), module="sglang"),
            },
            layouts=(
                Layout(
                    "single",
                    options={"kv_cache_mib": 64, "openai_endpoint": "loopback"},
                    without=(PAUSE_KEEP_CACHE,),  # not with an endpoint
                ),
                Layout(  # as on GPUs: on a CPU, SGLang has a prefix cache only without deterministic inference
                    "tp2",
                    options={"kv_cache_mib": 64, "tensor_parallel": 2, "deterministic": False},
                    without=(OPENAI_ENDPOINT, SEED),
                ),
            ),
        )
    )
