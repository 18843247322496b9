"""Registers the parts of this package. Every command imports this module, so it names code by strings."""

from __future__ import annotations

from enginehouse.plugin import RequirementSet, RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import PAUSE_KEEP, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.1"
"""The plugin contract that this is written for."""


TRANSFORMERS = "transformers==4.57.6"
"""Versions that the engine is tested with. The engine has its own Python environment, so the trainer's may differ."""


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="acme_rollout",
            summary="A transformers model with continuous batching, in its own Python environment",
            engine="acme_rollout.rollout:AcmeRolloutEngine",  # imported in the worker, nowhere else
            options="acme_rollout.rollout_options:AcmeRolloutOptions",
            capabilities={PAUSE_KEEP, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS},
            requires=(TRANSFORMERS,),
            runtimes={
                variant: RequirementSet(requirements=(TRANSFORMERS,), module="transformers")
                for variant in ("cpu", "cuda")
            },
        )
    )
