"""`enginehouse parity`: measures how far two engines' logprobs are apart."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginehouse_testing.cli.model_options import model_options

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse_rl.plan.plan import Plan
    from enginehouse_testing.parity import ParityReport

BAR_CELLS = 40


@click.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--train", "actor", metavar="ENGINE", help="Training engine; unset: the engine in CONFIG.")
@click.option("--rollout", metavar="ENGINE", help="Rollout engine; unset: the engine in CONFIG.")
@model_options
@click.option(
    "--prompts", default=32, show_default=True, type=click.IntRange(min=1), help="Number of prompts from data.train."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    help="Accepted mean absolute difference in nats; unset: 1e-4 in float32, 1e-2 in float16, 5e-2 in bfloat16.",
)
@click.option("--out", "directory", type=click.Path(file_okay=False, writable=True), help="Directory for parity.json.")
def parity(
    config: str,
    overrides: tuple[str, ...],
    actor: str | None,
    rollout: str | None,
    prompts: int,
    tolerance: float | None,
    directory: str | None,
    **model: Any,
) -> None:
    """Compare the log-probabilities of two engines token by token.

    A rollout engine and a training engine start as in a run of CONFIG with OVERRIDES and get the same weights. The
    rollout engine generates responses to prompts of data.train, and the training engine scores them. Nothing is trained
    and the run directory stays untouched. Each training step logs the same metrics as mismatch/*.

    \b
    enginehouse parity examples/quickstart/grpo.yaml
    enginehouse parity --train fsdp --rollout vllm grpo.yaml --prompts 64 --out parity

    Exit codes: 0 the mean difference is within the tolerance, 1 it is not, or an engine failed, 2 a mistake in the
    command, the config, the data or the model, 130 interrupted.
    """
    import tempfile

    from rich.console import Console

    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.config.schema import Config
    from enginehouse_rl.plan.plan import plan
    from enginehouse_testing.model_under_test import choose_model

    under_test = choose_model(**model)
    chosen = {
        "actor.engine.backend": actor,
        "rollout.engine.backend": rollout,
        "model.path": under_test.path,
        "model.dtype": under_test.dtype if under_test.path else model["dtype"],
    }
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with tempfile.TemporaryDirectory(prefix="enginehouse-parity-") as empty:
        changes = (
            *overrides,
            *(f"{key}={value}" for key, value in chosen.items() if value),
            f"run.directory={empty}",  # the directory in CONFIG may hold the run whose model is compared
            "algorithm.kl.coefficient=0",  # no reference model
            "weights.effect_check_every=0",  # it would stop at the first difference; this comparison shows more
        )
        planned = plan(load_config(config, changes, Config), config_path=config)
        if directory:
            _make(directory)
        report = _compare(planned, prompts, tolerance, under_test.described if under_test.path else "", console)
    _show(report, console)
    if directory:
        click.echo(f"written: {report.write(directory)}")
    sys.exit(0 if report.passed else 1)


def _make(directory: str) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{directory} cannot be created: {error.strerror}", param_hint="--out") from error


def _compare(planned: Plan, prompts: int, tolerance: float | None, model: str, console: Console) -> ParityReport:
    """Compare the engines of a plan. If a mistake of the user caused a worker's error, raise the mistake instead."""
    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse.controller.errors import unwrap_user_error

    status = console.status("comparing engines") if console.is_terminal else nullcontext()
    try:
        with Interrupts(lambda: None), status:
            from enginehouse_testing.parity import compare_engines

            return compare_engines(planned, prompts, tolerance, model)
    except (KeyboardInterrupt, SystemExit):  # ray's own handler of SIGTERM exits
        click.echo("Interrupted: nothing was compared.", err=True)
        sys.exit(EXIT_CODE)
    except Exception as error:
        mistake = unwrap_user_error(error)
        if mistake is not None and mistake is not error:
            raise mistake from error
        raise


def _show(report: ParityReport, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from enginehouse_rl.steps.mismatch import RATIO_BOUND
    from enginehouse_testing.model_under_test import PUBLISHED_KL
    from enginehouse_testing.parity import DECADES

    figures = report.found
    for label, engine in (("train", report.train), ("rollout", report.rollout)):
        console.print(f"{label:<8} {escape(engine)}", highlight=False)
    console.print(f"model    {escape(report.model)}", highlight=False)
    console.print(
        f"weights  by {report.transport}, {report.dtype}; samples at temperature {report.temperature:g}\n",
        highlight=False,
    )
    table = Table("logprobs, in nats", "", box=None)
    table.columns[1].justify = "right"
    table.add_row("mean difference", f"{figures.mean:.3g}")
    table.add_row("p50", f"{figures.p50:.3g}")
    table.add_row("p99", f"{figures.p99:.3g}")
    table.add_row("max", f"{figures.max:.3g}")
    table.add_row("KL (k3)", f"{figures.kl:.3g}")
    table.add_row("mean importance ratio", f"{figures.ratio:.6f}")
    table.add_row("mean ratio of a whole sample", f"{figures.sequence_ratio:.6f}")
    table.add_row(f"tokens off by more than {RATIO_BOUND:g} times", f"{figures.outside:.2%}")
    table.add_row("tokens", f"{figures.tokens:,}")
    table.add_row("samples", f"{figures.sequences:,}")
    console.print(table)

    console.print("\ntokens by difference", highlight=False)
    labels = [*(f"up to 1e{exponent:+03d}" for exponent in DECADES), f"above 1e{DECADES[-1]:+03d}"]
    counts = figures.histogram
    filled = [number for number, count in enumerate(counts) if count]
    for number in range(filled[0], filled[-1] + 1):
        bar = "█" * -(-counts[number] * BAR_CELLS // max(counts))
        console.print(f"  {labels[number]:<12} {counts[number]:>8,} {bar}", highlight=False)

    if report.dtype == "bfloat16":
        console.print(f"\n{PUBLISHED_KL}", highlight=False)
    verdict = "[green]passed[/]" if report.passed else "[bold red]FAILED[/]"
    allowed = "at most" if report.passed else "more than"
    console.print(f"\n{verdict}: mean difference {figures.mean:.3g}, {allowed} {report.tolerance:g}", highlight=False)
