"""`enginehouse rm`: a run that trains a reward model, on the same engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def rm(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a reward model on preferences, as the YAML file CONFIG says.

    The data are pairs, rows of {prompt, chosen, rejected}. The model that is written is one of transformers'
    AutoModelForSequenceClassification.

    OVERRIDES are dotted.key=value, the value in YAML; they win over the file. Paths in both are relative to the current
    directory. --resume and exit codes as those of `enginehouse train`.

    \b
    enginehouse rm rm.yaml train.steps=200 actor.engine.options.lr=1e-5
    """
    from enginehouse_rl.cli.session import run_config

    run_config("rm", config, overrides, resume=resume, show=show)
