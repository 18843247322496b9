"""What this package adds to enginehouse. Light: its engine is imported in the worker that runs it, nowhere else."""

from __future__ import annotations

from enginehouse.plugin import TrainBackend, hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="megatron",
            summary="Megatron Core: tensor, pipeline, context and expert parallel training",
            engine="enginehouse_megatron.engine:MegatronEngine",
            options="enginehouse_megatron.options:MegatronOptions",
            requires=("megatron-core>=0.16",),
            unavailable="its engine comes in a later release of enginehouse-megatron; "
            "until then use the built-in `torch` backend, which runs the same config",
        )
    )
