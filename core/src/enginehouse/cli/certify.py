"""`enginehouse certify`: what a training backend was found to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.testing.certificate import Certificate, Result

ARROW = " -> "
"""Between the names of two layouts, of what went from one to the other."""


@click.command()
@click.argument("backend")
@click.option("--out", "directory", required=True, type=click.Path(file_okay=False), help="Where the certificate goes.")
@click.option("--layout", "layouts", multiple=True, metavar="NAME", help="Only this layout; may be repeated.")
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check; may be repeated.")
def certify(backend: str, directory: str, layouts: tuple[str, ...], checks: tuple[str, ...]) -> None:
    """Check that the training backend BACKEND does what it promises, at every layout it declares.

    Writes certificate.json and certificate.md, anew after each check: what is interrupted says so, and never passes.
    With --layout or --check only a part is run, and the certificate does not say that the backend passed.

    \b
    enginehouse certify torch --out certificates/torch
    enginehouse certify fsdp --out /tmp/fsdp --layout tp2 --check logprobs --check gradients

    Exit codes: 0 everything asked for passed (checks that need GPUs this machine lacks are listed as not run),
    1 something failed, 2 a mistake in the command, 130 interrupted.
    """
    from rich.console import Console

    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse.plugin import plugins
    from enginehouse.testing.running import Case
    from enginehouse.testing.running import certify as run

    record = plugins().get("train", backend)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    said = 0

    def begins(case: Case, number: int, of: int) -> None:
        console.print(f"[dim]{number:>{len(str(of))}}/{of}[/] {case.check.name} [dim]{case.layout}[/]", highlight=False)

    def ended(certificate: Certificate) -> None:
        nonlocal said
        certificate.write(directory)
        for result in certificate.checks[said:]:
            if result.outcome == "failed":
                console.print(f"    failed: {result.detail}", style="red", markup=False, highlight=False)
        said = len(certificate.checks)

    where = Path(directory) / "certificate.json"
    try:
        with Interrupts(lambda: None):
            certificate = run(record, layouts=layouts or None, checks=checks or None, begins=begins, ended=ended)
    except (KeyboardInterrupt, SystemExit):
        click.echo(f"Interrupted. What was found until then is in {where}", err=True)
        sys.exit(EXIT_CODE)
    _show(certificate, console)
    click.echo(f"{certificate.backend}: {certificate.verdict()}. {where}")
    sys.exit(0 if certificate.clean else 1)


def _show(certificate: Certificate, console: Console) -> None:
    """A line a check, a column a layout; what went from one layout to another has a column of its own, its worst."""
    from rich.table import Table

    layouts = list(dict.fromkeys(one.layout for one in certificate.checks if one.layout and ARROW not in one.layout))
    between = any(ARROW in one.layout for one in certificate.checks)
    table = Table("check", "at most", *layouts, *(["between"] if between else []), box=None)
    for name in dict.fromkeys(one.name for one in certificate.checks):
        found = [one for one in certificate.checks if one.name == name]
        at = {one.layout: one for one in found}
        cells = [_cell(at.get(layout, at.get(""))) for layout in layouts]
        if between:
            moved = [one for one in found if ARROW in one.layout]
            worst = max(moved, key=lambda one: (one.outcome == "failed", one.measured or 0.0), default=None)
            cells.append(_cell(worst))
        tolerance = found[0].tolerance
        table.add_row(name, f"{tolerance:g}" if tolerance else "exact", *cells)
    console.print(table)


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome == "passed":
        return f"[green]{result.measured:.1e}[/]" if result.measured else "[green]equal[/]"
    if result.outcome == "failed":
        return "[bold red]FAILED[/]"
    return f"[dim]{result.outcome}[/]"
