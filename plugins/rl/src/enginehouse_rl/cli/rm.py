"""`enginehouse rm`: a run that trains a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def rm(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a reward model, configured by the YAML file CONFIG.

    The rows of the data are pairs {prompt, chosen, rejected}. The run writes a model for
    AutoModelForSequenceClassification of transformers.

    OVERRIDES are key.of.config=value, with the value in YAML. --resume and exit codes are as for `enginehouse train`.

    \b
    enginehouse rm rm.yaml train.steps=200 actor.engine.options.lr=1e-5
    """
    from enginehouse_rl.cli.session import run_config

    run_config("rm", config, overrides, resume=resume, show=show)
