"""What this package adds to enginehouse. Every command imports it: code is named by strings, and not imported."""

from __future__ import annotations

from enginehouse.plugin import RequirementSet, RolloutBackend, hookimpl
from enginehouse.plugin.capabilities import PAUSE_KEEP, PROMPT_LOGPROBS, SEED, STOP_STRINGS, WEIGHT_CHECKSUMS

enginehouse_protocol = "1.1"
"""The plugin contract that this is written for."""


TRANSFORMERS = "transformers==4.57.6"
"""What the engine is tested with, whatever the trainer has: it runs in a Python environment of its own."""


@hookimpl
def enginehouse_register_backends(register):
    register(
        RolloutBackend(
            name="acme_rollout",
            summary="A transformers model, continuously batched, with a version of transformers of its own",
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
