"""`enginehouse matrix`: writes the compatibility page from certificates and short real runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginehouse_testing.cli.model_options import model_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enginehouse_testing.matrix.combination import Combination
    from enginehouse_testing.matrix.findings import MatrixFindings
    from enginehouse_testing.matrix.making import MatrixMaker
    from enginehouse_testing.model_under_test import ModelUnderTest


@click.command()
@click.option("--train", multiple=True, metavar="NAME", help="Training engine to test; may be repeated; unset: all.")
@click.option("--rollout", multiple=True, metavar="NAME", help="Rollout engine to test; may be repeated; unset: all.")
@click.option(
    "--transport", multiple=True, metavar="NAME", help="Weight transport to test; may be repeated; unset: all."
)
@click.option("--plugin", metavar="NAME", help="Plugin whose combinations are tested; also writes its badge.")
@model_options
@click.option("--steps", default=6, show_default=True, type=click.IntRange(min=1), help="Number of steps of each run.")
@click.option(
    "--processes",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Largest number of training processes, and of rollout replicas, in a run.",
)
@click.option(
    "--output",
    default="compatibility.md",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="Output page; the measurements go beside it as JSON.",
)
@click.option(
    "--directory",
    default="runs/matrix",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Directory for runs and their logs.",
)
@click.option(
    "--certificates",
    type=click.Path(file_okay=False),
    help="Directory of certificates, as KIND/NAME; unset: certificates/ in --directory.",
)
@click.option("--certify/--no-certify", "make", default=True, show_default=True, help="Create missing certificates.")
@click.option("--again", is_flag=True, help="Repeat runs that have a result for the same versions.")
def matrix(
    train: tuple[str, ...],
    rollout: tuple[str, ...],
    transport: tuple[str, ...],
    plugin: str | None,
    steps: int,
    processes: int,
    output: str,
    directory: str,
    certificates: str | None,
    make: bool,
    again: bool,
    **model: Any,
) -> None:
    """Test which engines work together.

    The command certifies each registered engine and weight transport. Then it makes a short real run of each
    combination that `enginehouse plan` accepts, and writes a page with the results. A second call repeats only what is
    missing, failed, or was made with other versions or settings.

    \b
    enginehouse matrix --output docs/compatibility.md
    enginehouse matrix --train fsdp --rollout torch --rollout vllm --no-certify

    Exit codes: 0 passed, 1 a run or a certificate failed, 2 a mistake in the command, 130 interrupted. More:
    plugins/testing/README.md.
    """
    from enginehouse.plugin import plugins
    from enginehouse_testing.matrix.combination import KINDS, Setting, combinations, parts_of_plugin
    from enginehouse_testing.matrix.making import MatrixMaker, parts_of
    from enginehouse_testing.model_under_test import choose_model

    page, under_test = Path(output), choose_model(**model)
    if under_test.label:
        click.echo(f"model: {under_test}")
    chosen = combinations(plugins(), dict(zip(KINDS, (train, rollout, transport), strict=True)), under_test.label)
    parts = parts_of_plugin(plugins(), plugin) if plugin else []
    chosen = [row for row in chosen if not parts or any((kind, getattr(row, kind)) in parts for kind in KINDS)]
    findings = _read_findings(page, under_test, plugin, _command(page, steps, processes, plugin))
    progress = _Progress(len(chosen) + len(parts_of(chosen, under_test)))
    maker = MatrixMaker(
        plugins=plugins(),
        setting=Setting(steps=steps, processes=processes),
        directory=Path(directory),
        certificates=Path(certificates or Path(directory, "certificates")),
        findings=findings,
        page=page,
        onlooker=progress,
        model=under_test,
    )
    clean = _make(maker, progress, chosen, make, again)
    _say_written(page, parts, findings)
    sys.exit(0 if clean else 1)


def _read_findings(page: Path, model: ModelUnderTest, plugin: str | None, command: str) -> MatrixFindings:
    """Return the findings of a page, with the command that makes the page again.

    This command is `command`. But if `model` is a user's model and the page already has a command, that command is
    kept.
    """
    from enginehouse_testing.matrix.findings import earlier_findings

    findings = earlier_findings(page)
    findings.plugin = plugin or ""
    if not (model.label and findings.command):
        findings.command = command
    return findings


def _say_written(page: Path, parts: Sequence[tuple[str, str]], findings: MatrixFindings) -> None:
    """Print the path of the page. If a plugin's `parts` were certified with the tiny models, write their badge."""
    from enginehouse_testing.matrix.badge import write_badge

    click.echo(f"written: {page}")
    if not parts:
        return
    summaries = [findings.certificates.get((*part, "")) for part in parts]
    for path in write_badge(page, [summary for summary in summaries if summary]):
        click.echo(f"written: {path}")


def _make(maker: MatrixMaker, progress: _Progress, chosen: Sequence[Combination], make: bool, again: bool) -> bool:
    """Make the matrix, and return True if nothing failed."""
    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts

    def say_interrupted() -> None:
        click.echo(f"Interrupted. Results so far: {maker.page}. The same command continues from there.", err=True)

    try:
        with Interrupts(say_interrupted), progress:
            certified = maker.certify(chosen, make=make, again=again)
            return maker.run(chosen, again=again) and certified
    except (KeyboardInterrupt, SystemExit):  # ray's own handler of SIGTERM exits
        say_interrupted()
        sys.exit(EXIT_CODE)


class _Progress:
    """Shows a bar on a terminal, and prints a line for each finding. Implements `Onlooker`.

    Args:
        of: expected number of findings.
    """

    def __init__(self, of: int):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from enginehouse.cli.console import terminal

        console = terminal()
        self._console, self._of, self._number, self._what = console, of, 0, ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=of)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begins(self, what: str) -> None:
        """Count a certificate or a combination that begins."""
        self._what = what
        self._number += 1
        self._bar.update(self._task, description=what)

    def part(self, number: int, of: int, what: str) -> None:
        """Show a part that begins."""
        self._bar.update(self._task, description=f"{self._what}: {number}/{of} {what}")

    def ended(self, message: str, failed: bool) -> None:
        """Print the line of a finding."""
        self._bar.advance(self._task)
        line = f"{self._number:>{len(str(self._of))}}/{self._of} {self._what}: {message}"
        self._console.print(line, style="red" if failed else None, markup=False, highlight=False, soft_wrap=True)


def _command(page: Path, steps: int, processes: int, plugin: str | None) -> str:
    """Return the command that writes the whole page again."""
    setting = {"--plugin": plugin, "--steps": steps, "--processes": processes}
    defaults = {option.opts[0]: option.default for option in matrix.params}
    changed = {name: value for name, value in setting.items() if value is not None and value != defaults[name]}
    words = [str(word) for option in changed.items() for word in option]
    return shlex.join(["enginehouse", "matrix", *words, "--output", str(page)])
