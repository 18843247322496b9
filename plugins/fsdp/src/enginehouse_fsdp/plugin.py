"""Declare the engine to enginehouse. Light: only the worker that runs the engine imports it."""

from __future__ import annotations

from enginehouse.plugin import Layout, TrainBackend, capabilities, hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="fsdp",
            summary="PyTorch FSDP2: sharded data parallel, any Hugging Face causal LM",
            engine="enginehouse_fsdp.engine:FSDPEngine",
            options="enginehouse_fsdp.options:FSDPOptions",
            capabilities={
                capabilities.ADAPTER_UPDATES,
                capabilities.BACKGROUND_SAVE,
                capabilities.EXPERTS,
                capabilities.HALF_PRECISION,
                capabilities.LORA,
                capabilities.OFFLOAD,
                capabilities.RESHARD_CHECKPOINT,
                capabilities.VALUE_HEAD,
            },
            requires=("torch>=2.9",),
            layouts=(
                Layout("single"),
                Layout("shard2", 2),
                Layout("shard4", 4),
                Layout("replicas2-shard2", 4, {"replicas": 2}),
                Layout("tp2", 2, {"tensor_parallel": 2}, without=(capabilities.EXPERTS,)),
                Layout("shard2-tp2", 4, {"tensor_parallel": 2}, without=(capabilities.EXPERTS,)),
                Layout("cp2", 2, {"context_parallel": 2}),
                Layout("shard2-cp2", 4, {"context_parallel": 2}),
            ),
        )
    )
