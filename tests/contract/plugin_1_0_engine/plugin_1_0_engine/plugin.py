"""What this plugin declares."""

from enginehouse.plugin import TrainBackend, hookimpl

enginehouse_protocol = "1.0"


@hookimpl
def enginehouse_register_backends(register):
    register(
        TrainBackend(
            name="early",
            summary="AdamW over the whole model, rows padded",
            engine="plugin_1_0_engine.training:Engine",
            options="enginehouse.engines.options:TrainOptions",
            requires=("torch", "transformers"),
        )
    )
