"""What this package adds to enginehouse. Light: its engine is imported in the worker that runs it, nowhere else."""

from __future__ import annotations

from enginehouse.plugin import TrainBackend, hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="fsdp",
            summary="PyTorch FSDP2: sharded data parallel, any Hugging Face causal LM",
            engine="enginehouse_fsdp.engine:FSDPEngine",
            options="enginehouse_fsdp.options:FSDPOptions",
            requires=("torch>=2.6",),
        )
    )
