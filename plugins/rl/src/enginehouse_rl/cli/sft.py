"""`enginehouse sft`: a supervised run, on the same engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from enginehouse_rl.cli.output import add_output_options

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="Go on with the run in run.directory, from its newest checkpoint.")
@add_output_options
def sft(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a model on demonstrations, as the YAML file CONFIG says.

    OVERRIDES are dotted.key=value, the value in YAML; they win over the file. Paths in both are relative to the current
    directory. --resume and exit codes as those of `enginehouse train`.

    \b
    enginehouse sft examples/quickstart/sft.yaml
    enginehouse sft sft.yaml train.steps=200 actor.engine.options.lr=1e-3
    """
    from enginehouse_rl.cli.session import run_plan
    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.config.schema import SFTConfig
    from enginehouse_rl.plan.plan import plan_sft

    planned = plan_sft(
        load_config(config, overrides, SFTConfig), config_path=config, resume=resume, overrides=overrides
    )

    def build(run, progress):
        from enginehouse_rl.loop.sft import SFTTrainer

        return SFTTrainer(planned, run, progress)

    run_plan(planned, build, show=show)
