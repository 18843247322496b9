"""`enginehouse sft`: a supervised run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def sft(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a model on demonstrations, configured by the YAML file CONFIG.

    OVERRIDES are key.of.config=value, with the value in YAML. --resume and exit codes are as for `enginehouse train`.

    \b
    enginehouse sft examples/quickstart/sft.yaml
    enginehouse sft sft.yaml train.steps=200 actor.engine.options.lr=1e-3
    """
    from enginehouse_rl.cli.session import run_config

    run_config("sft", config, overrides, resume=resume, show=show)
