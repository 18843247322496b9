"""`enginehouse dpo`: a run on preferences, by DPO or KTO, on the same engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.cli.output import training_command

if TYPE_CHECKING:
    from enginehouse_rl.cli.output import Show


@training_command
def dpo(config: str, overrides: tuple[str, ...], resume: bool, show: Show) -> None:
    """Train a policy on preferences by DPO or KTO, as the YAML file CONFIG says.

    The data are pairs, rows of {prompt, chosen, rejected}; for algorithm.loss=kto rated responses, rows of
    {prompt, completion, label}.

    OVERRIDES are dotted.key=value, the value in YAML; they win over the file. Paths in both are relative to the current
    directory. --resume and exit codes as those of `enginehouse train`.

    \b
    enginehouse dpo dpo.yaml train.steps=200 algorithm.beta=0.05
    enginehouse dpo kto.yaml algorithm.loss=kto
    """
    from enginehouse_rl.cli.session import run_config

    run_config("dpo", config, overrides, resume=resume, show=show)
