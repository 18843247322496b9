"""A plugin whose rollout engines say they serve the new weights, to the update and with every sample, and do not."""

from __future__ import annotations

import dataclasses

from enginehouse.plugin import RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import COLOCATES, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="stale",
            summary="Serves the weights it was started with, under any version",
            engine="stale_rollout:engine",
            options="enginehouse_torch.options:TorchRolloutOptions",
            capabilities={COLOCATES, STOP_STRINGS, SEED, PROMPT_LOGPROBS, WEIGHT_CHECKSUMS},
        )
    )
    for name, summary in (("dropping", "Drops every weight update"), ("dropping-once", "Drops the second one")):
        register(
            RolloutBackend(
                name=name,
                summary=f"{summary}, and cannot be read back",
                engine=f"stale_rollout:{name.replace('-', '_')}",
                options="enginehouse_torch.options:TorchRolloutOptions",
                capabilities={COLOCATES, STOP_STRINGS, SEED, PROMPT_LOGPROBS},
            )
        )


def engine():
    """The engine; a function, since this module is imported to list plugins and must import no torch."""
    from weights.faults import StaleEngine

    class LyingEngine(StaleEngine):
        async def generate(self, request):
            result = await super().generate(request)
            claimed = {"first_version": self.pretended, "last_version": self.pretended}
            completions = [dataclasses.replace(one, **claimed) for one in result.completions]
            return dataclasses.replace(result, completions=completions)

    return LyingEngine()


def dropping():
    from weights.faults import DroppingEngine

    return DroppingEngine()


def dropping_once():
    from weights.faults import DroppingOnceEngine

    return DroppingOnceEngine()
