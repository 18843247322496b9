"""What this package adds to enginehouse. Light: its engine is imported in the worker that runs it, nowhere else."""

from __future__ import annotations

from enginehouse.plugin import RolloutBackend, hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="vllm",
            summary="vLLM: paged, continuously batched generation",
            engine="enginehouse_vllm.engine:VLLMEngine",
            options="enginehouse_vllm.options:VLLMOptions",
            requires=("vllm>=0.32",),
            unavailable="its engine comes in a later release of enginehouse-vllm; "
            "until then use the built-in `torch` backend, which runs the same config",
        )
    )
