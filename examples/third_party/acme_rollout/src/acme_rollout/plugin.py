"""The records that this package adds to enginehouse. Every command imports this module, so it names code by strings."""

from __future__ import annotations

from enginehouse.plugin import RequirementSet, RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import PAUSE_KEEP, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.1"
"""The contract version that this plugin is written for."""


TRANSFORMERS = "transformers==4.57.6"
"""The version that the engine is tested with. The trainer may have another: the engine runs in a separate runtime."""


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="acme_rollout",
            summary="A transformers model with continuous batching, in a runtime with transformers 4.57",
            engine="acme_rollout.rollout:AcmeRolloutEngine",  # imported only in the worker
            options="acme_rollout.rollout_options:AcmeRolloutOptions",
            capabilities={PAUSE_KEEP, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS},
            requires=(TRANSFORMERS,),
            runtimes={
                variant: RequirementSet(requirements=(TRANSFORMERS,), module="transformers")
                for variant in ("cpu", "cuda")
            },
        )
    )
