"""`enginehouse plan`: check a config and say what it would do."""

from __future__ import annotations

import click


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="As if the run in run.directory were to go on.")
@click.option("--sft", "supervised", is_flag=True, help="CONFIG is one for `enginehouse sft`.")
def plan(config: str, overrides: tuple[str, ...], resume: bool, supervised: bool) -> None:
    """Check CONFIG with OVERRIDES, and say what `enginehouse train` would do with them. Nothing is started or written.

    \b
    enginehouse plan examples/quickstart/grpo.yaml rollout.placement=separate
    enginehouse plan --sft examples/quickstart/sft.yaml

    Exit codes: 0 the run can start, 2 it cannot; then everything that is wrong is listed.
    """
    from enginehouse.config.load import load_config
    from enginehouse.config.plan import RunPlan, plan_sft
    from enginehouse.config.plan import plan as plan_rl
    from enginehouse.config.schema import Config, SFTConfig

    planned: RunPlan
    if supervised:
        planned = plan_sft(
            load_config(config, overrides, SFTConfig), config_path=config, resume=resume, overrides=overrides
        )
    else:
        planned = plan_rl(
            load_config(config, overrides, Config), config_path=config, resume=resume, overrides=overrides
        )
    click.echo(planned.render())
