"""The records that this package adds to enginehouse. Every command imports this module, so it names code by strings."""

from __future__ import annotations

from enginehouse.plugin import Layout, TrainBackend, hookimpl
from enginehouse.plugin.capabilities import RESHARD_CHECKPOINT

enginehouse_protocol = "1.1"
"""The contract version that this plugin is written for."""


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="acme_train",
            summary="A transformers model, data parallel by accelerate",
            engine="acme_train.train:AcmeTrainEngine",  # imported only in the worker
            options="acme_train.train_options:AcmeTrainOptions",
            requires=("accelerate>=1.0",),
            capabilities={RESHARD_CHECKPOINT},
            layouts=(Layout("single"), Layout("dp2", 2)),
        )
    )
