"""`enginehouse dpo`: a run on preferences, by DPO or KTO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def dpo(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a policy with DPO or KTO, configured by the YAML file CONFIG.

    The rows of the data are pairs {prompt, chosen, rejected}; with algorithm.loss=kto they are rated responses
    {prompt, completion, label}.

    OVERRIDES are key.of.config=value, with the value in YAML. --resume and exit codes are as for `enginehouse train`.

    \b
    enginehouse dpo dpo.yaml train.steps=200 algorithm.beta=0.05
    enginehouse dpo kto.yaml algorithm.loss=kto
    """
    from enginehouse_rl.cli.session import run_config

    run_config("dpo", config, overrides, resume=resume, show=show)
