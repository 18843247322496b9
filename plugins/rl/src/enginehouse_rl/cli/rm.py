"""`enginehouse rm`: a run that trains a reward model, on the same engines."""

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
def rm(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a reward model on preferences, as the YAML file CONFIG says.

    The data are pairs, rows of {prompt, chosen, rejected}. The model that is written is one of transformers'
    AutoModelForSequenceClassification.

    OVERRIDES are dotted.key=value, the value in YAML; they win over the file. Paths in both are relative to the current
    directory. --resume and exit codes as those of `enginehouse train`.

    \b
    enginehouse rm rm.yaml train.steps=200 actor.engine.options.lr=1e-5
    """
    from enginehouse_rl.cli.session import run_preferences
    from enginehouse_rl.config.schema import RMConfig

    run_preferences(RMConfig, config, overrides, resume=resume, show=show)
