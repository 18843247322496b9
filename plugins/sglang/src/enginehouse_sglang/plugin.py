"""What this package adds to enginehouse. Light: its engine is imported in the worker that runs it, nowhere else."""

from __future__ import annotations

from enginehouse.plugin import RequirementSet, RolloutBackend, hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="sglang",
            summary="SGLang: paged, prefix-caching generation on GPUs",
            engine="enginehouse_sglang.engine:SGLangEngine",
            options="enginehouse_sglang.options:SGLangOptions",
            requires=("sglang>=0.5.21,<0.6",),
            runtimes={
                "cpu": RequirementSet(
                    lock="enginehouse_sglang:cpu.lock", module="sglang", prepare="enginehouse_sglang.on_cpu:adapt"
                ),
                "cuda": RequirementSet(requirements=("sglang>=0.5.21,<0.6",), module="sglang"),
            },
            unavailable="its engine comes in a later release of enginehouse-sglang; "
            "until then use the built-in `torch` backend, which runs the same config",
        )
    )
