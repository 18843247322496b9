"""A plugin of rollout engines that say they serve the new weights, to the update and with every sample, and do not; and
of one that declares nothing, and refuses all that it has not declared."""

from enginehouse.plugin import RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import COLOCATES, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="stale",
            summary="Serves the weights it was started with, under any version",
            engine="weights.faults:LyingEngine",
            options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={COLOCATES, STOP_STRINGS, SEED, PROMPT_LOGPROBS, WEIGHT_CHECKSUMS},
        )
    )
    register(
        RolloutBackend(
            name="unpromising",
            summary="Declares nothing, and refuses the rest",
            engine="weights.faults:UnpromisingEngine",
            options="enginehouse_torch.options:TorchRolloutOptions",
        )
    )
    for name, engine, summary in (
        ("dropping", "DroppingEngine", "Drops every weight update"),
        ("dropping-once", "DroppingOnceEngine", "Drops the second one"),
    ):
        register(
            RolloutBackend(
                name=name,
                summary=f"{summary}, and cannot be read back",
                engine=f"weights.faults:{engine}",
                options="enginehouse_torch.options:TorchRolloutOptions",
                capabilities={COLOCATES, STOP_STRINGS, SEED, PROMPT_LOGPROBS},
            )
        )
