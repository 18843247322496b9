"""`enginehouse certify`: what a backend or a weight transport was found to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginehouse.errors import UserError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.plugin import Backend, Transport
    from enginehouse_testing.certificate import Certificate, Result

ARROW = " -> "
"""Between the names of two layouts, of what went from one to the other."""


KINDS = ("train", "rollout", "transport")
"""What has a suite."""


@click.command()
@click.argument("name")
@click.option("--out", "directory", required=True, type=click.Path(file_okay=False), help="Where the certificate goes.")
@click.option("--kind", type=click.Choice(KINDS), help="Only the backend, or transport, of this kind.")
@click.option("--layout", "layouts", multiple=True, metavar="NAME", help="Only this layout; may be repeated.")
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check; may be repeated.")
@click.option("--runtime", default="auto", metavar="auto|NAME|PATH", help="The runtime of a rollout backend.")
@click.option("--quick", is_flag=True, help="Only the first layout, and the few checks that find most: begin with it.")
@click.option("--fail-fast", is_flag=True, help="End with the first check that fails.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Longest a check's act may take."
)
def certify(
    name: str,
    directory: str,
    kind: str | None,
    layouts: tuple[str, ...],
    checks: tuple[str, ...],
    runtime: str,
    quick: bool,
    fail_fast: bool,
    timeout: float | None,
) -> None:
    """Check that the backend or weight transport NAME does what it promises, at every layout it declares.

    Writes certificate.json and certificate.md, anew after each check: what is interrupted says so, and never passes.
    Of a name that is both a training and a rollout backend both are checked, and each has a folder of its own.
    With --layout, --check or --quick only a part is run, and the certificate does not say that the backend passed.

    With two cores a rollout engine takes about a minute a layout, a large one, which is launched several times, ten; a
    training engine takes two minutes a layout. Begin with the first of these lines; an act that hangs costs 180 s of a
    training engine, 600 s of a rollout engine, launch included, or what --timeout says.

    \b
    enginehouse certify mine --out /tmp/mine --quick --fail-fast --timeout 60
    enginehouse certify torch --out certificates/torch
    enginehouse certify vllm --out certificates/vllm
    enginehouse certify fsdp --out /tmp/fsdp --layout tp2 --check logprobs --check gradients

    Exit codes: 0 everything asked for passed (checks that need GPUs this machine lacks are listed as not run),
    1 something failed, 2 a mistake in the command, 130 interrupted.
    """
    from rich.console import Console

    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse_testing.unwritten import unwritten

    if quick and checks:
        raise UserError("--quick chooses the checks; leave out --check, or --quick")
    records = _records(name, kind, layouts or None, checks or None)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    clean = True
    for record in records:
        if not checks and (missing := unwritten(record)):
            click.echo("\n".join(map(str, missing)))
            click.echo(
                f"{record.name} ({record.kind}): nothing was checked, {len(missing)} methods are yet to be written"
            )
            clean = False
            continue
        where = Path(directory, record.kind) if len(records) > 1 else Path(directory)
        chosen: tuple[Sequence[str] | None, Sequence[str] | None] = (layouts or None, checks or None)
        if quick:
            chosen = _quick(record, layouts)
        try:
            with Interrupts(lambda: None):
                certificate = _run(record, where, *chosen, runtime, timeout, fail_fast, console)
        except (KeyboardInterrupt, SystemExit):
            click.echo(f"Interrupted. What was found until then is in {where / 'certificate.json'}", err=True)
            sys.exit(EXIT_CODE)
        _show(certificate, console)
        click.echo(f"{record.name} ({record.kind}): {certificate.verdict()}. {where / 'certificate.json'}")
        clean = clean and certificate.clean
        if fail_fast and not clean:
            break
    sys.exit(0 if clean else 1)


def _records(
    name: str, kind: str | None, layouts: Sequence[str] | None, checks: Sequence[str] | None
) -> list[Backend | Transport]:
    """What a name stands for, of every kind that has the layouts and checks asked for.

    Raises:
        UserError: there is nothing of that name, or no such layout or check.
    """
    from enginehouse.plugin import PluginLookupError, plugins
    from enginehouse_testing.running import cases

    found = plugins()
    kinds = [kind] if kind else [one for one in KINDS if found.providers(one, name)]
    try:
        records = [found.get(one, name, elsewhere=one == "rollout") for one in kinds or KINDS[:1]]
    except PluginLookupError as error:
        if kinds or error.reason != "unknown":
            raise
        known = {record.name for one in KINDS for record in found.all(one)}
        raise UserError(f"no backend or weight transport is called {name!r}; {nearest(name, known)}") from error
    if len(records) == 1:
        cases(records[0], layouts, checks)
        return records
    fitting, errors = [], []
    for record in records:
        try:
            cases(record, layouts, checks)
            fitting.append(record)
        except UserError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    return fitting


def _quick(record: Backend | Transport, layouts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Layouts and checks of a first look: one layout, unless others are asked for, and what finds most."""
    from enginehouse_testing.running import QUICK, layouts_of

    return layouts or [layouts_of(record)[0].name], QUICK[record.kind]


def _run(
    record: Backend | Transport,
    directory: Path,
    layouts: Sequence[str] | None,
    checks: Sequence[str] | None,
    runtime: str,
    timeout: float | None,
    fail_fast: bool,
    console: Console,
) -> Certificate:
    """Run one suite, with a line for each case, and the certificate written after each."""
    from enginehouse_testing.running import Case
    from enginehouse_testing.running import certify as run

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

    return run(
        record,
        layouts=layouts,
        checks=checks,
        runtime=runtime,
        timeout=timeout,
        fail_fast=fail_fast,
        begins=begins,
        ended=ended,
    )


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
