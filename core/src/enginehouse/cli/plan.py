"""`enginehouse plan`: check a config and say what it would do."""

from __future__ import annotations

import click


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="As if the run in run.directory were to go on.")
@click.option("--sft", "command", flag_value="sft", help="CONFIG is one for `enginehouse sft`.")
@click.option("--dpo", "command", flag_value="dpo", help="CONFIG is one for `enginehouse dpo`.")
@click.option("--rm", "command", flag_value="rm", help="CONFIG is one for `enginehouse rm`.")
def plan(config: str, overrides: tuple[str, ...], resume: bool, command: str | None) -> None:
    """Check CONFIG with OVERRIDES, and say what `enginehouse train` would do with them. Nothing is started or written.

    \b
    enginehouse plan examples/quickstart/grpo.yaml rollout.placement=separate
    enginehouse plan --sft examples/quickstart/sft.yaml

    Exit codes: 0 the run can start, 2 it cannot; then everything that is wrong is listed.
    """
    from enginehouse.config.load import load_config
    from enginehouse.config.plan import PLANS
    from enginehouse.config.schema import SCHEMAS

    command = command or "train"
    loaded = load_config(config, overrides, SCHEMAS[command])
    click.echo(PLANS[command](loaded, config_path=config, resume=resume, overrides=overrides).render())
