"""`enginehouse plan`: checks a config and describes the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from enginehouse_rl.plan.plan import RunPlan


GPU_KINDS = "H100, H200, B200, A100, A100-40, L40S, A6000, A10, L4 or RTX4090"
"""The keys of `GPUS_GIB`, repeated here so that `--help` need not import the planner."""


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="Check whether the run in run.directory can be resumed.")
@click.option("--sft", "command", flag_value="sft", help="CONFIG is a config for `enginehouse sft`.")
@click.option("--dpo", "command", flag_value="dpo", help="CONFIG is a config for `enginehouse dpo`.")
@click.option("--rm", "command", flag_value="rm", help="CONFIG is a config for `enginehouse rm`.")
@click.option(
    "--gpus", type=click.IntRange(min=1), metavar="N", help="Plan for N GPUs instead of those on this machine."
)
@click.option("--gpu", "kind", metavar="KIND", help=f"GPU model for the plan: {GPU_KINDS}.")
@click.option(
    "--suggest", is_flag=True, help="If the run does not fit into the GPUs, find the nearest layout that fits."
)
def plan(
    config: str,
    overrides: tuple[str, ...],
    resume: bool,
    command: str | None,
    gpus: int | None,
    kind: str | None,
    suggest: bool,
) -> None:
    """Check CONFIG with OVERRIDES and describe the run, without starting or writing anything.

    \b
    enginehouse plan examples/quickstart/grpo.yaml rollout.placement=separate
    enginehouse plan --sft examples/quickstart/sft.yaml
    enginehouse plan examples/quickstart/grpo.yaml --suggest --gpus 8 --gpu H100

    Exit codes: 0 the run can start, 2 it cannot; the output then lists every problem.
    """
    from enginehouse.errors import ConfigError, UserError, nearest
    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.config.schema import SCHEMAS
    from enginehouse_rl.plan.device import GPUS_GIB, Gpu, assume_gpus, visible_gpus
    from enginehouse_rl.plan.layouts import find_layout
    from enginehouse_rl.plan.memory import SUGGEST
    from enginehouse_rl.plan.plan import PLANS

    if kind is not None and (kind := kind.upper()) not in GPUS_GIB:
        raise ConfigError(f"--gpu: unknown kind of GPU {kind!r}. {nearest(kind, GPUS_GIB)}")
    schema, check = SCHEMAS[command or "train"], PLANS[command or "train"]

    def make_plan(further: Sequence[str] = ()) -> RunPlan:
        all_overrides = (*overrides, *further)
        loaded = load_config(config, all_overrides, schema)
        return check(loaded, config_path=config, resume=resume, overrides=all_overrides, starts=False)

    number = gpus or (1 if kind else None)
    with nullcontext() if number is None else assume_gpus(number, Gpu.from_kind(kind) if kind else None):
        try:
            planned = make_plan()
            click.echo(planned.render())
            if planned.obstacle:
                raise SystemExit(2)
        except UserError as error:
            if not suggest:
                raise
            refusal = str(error).replace(SUGGEST, "")
            if (layout := find_layout(load_config(config, overrides, schema), make_plan, visible_gpus())) is None:
                raise ConfigError(f"{refusal}\nThe run cannot start with any other layout that was tried") from error
            changes, fitting = layout
            click.echo(f"{refusal}\n", err=True)
            click.echo(f"The run can start with these overrides:\n\n  {' '.join(changes)}\n\n{fitting.render()}")
            raise SystemExit(2) from error
