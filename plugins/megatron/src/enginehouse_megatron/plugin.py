"""Declares what this package adds to enginehouse. Only the worker that runs the engine imports the engine."""

from __future__ import annotations

from enginehouse.plugin import DispatchMode, Layout, TrainBackend, capabilities, hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="megatron",
            summary="Megatron Core: tensor, pipeline, context, expert and data parallel training of decoders",
            engine="enginehouse_megatron.engine:MegatronEngine",
            options="enginehouse_megatron.options:MegatronOptions",
            capabilities={
                capabilities.ADAPTER_UPDATES,
                capabilities.EXPERTS,
                capabilities.HALF_PRECISION,
                capabilities.LORA,
                capabilities.OFFLOAD,
                capabilities.RESHARD_CHECKPOINT,
                capabilities.VALUE_HEAD,
            },
            requires=("torch>=2.9", "megatron-core>=0.16.1,<0.17"),
            layouts=(
                Layout("single"),
                Layout("tp2", 2, {"tensor_parallel": 2, "sequence_parallel": False}, without=(capabilities.EXPERTS,)),
                Layout("pp2", 2, {"pipeline_parallel": 2}),
                Layout("dp2", 2),
                Layout("cp2", 2, {"context_parallel": 2}),
                Layout("tp2-pp2", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
                Layout("ep2", 2, {"expert_parallel": 2}, only=(capabilities.EXPERTS,)),
                Layout("tp2-ep2", 4, {"tensor_parallel": 2, "expert_parallel": 2}, only=(capabilities.EXPERTS,)),
                Layout("pp2-ep2", 4, {"pipeline_parallel": 2, "expert_parallel": 2}, only=(capabilities.EXPERTS,)),
            ),
        )
    )


@hookimpl
def enginehouse_register_dispatch_modes(register):
    register(
        DispatchMode(
            name="megatron_compute",
            summary="One entry of each argument for each data-parallel rank; a list of results of the last stage",
            dispatch="enginehouse_megatron.dispatch:megatron_compute",
            collect="list",
            returning="enginehouse.controller.dispatch:output_ranks",
            awaits_futures=True,
        )
    )
