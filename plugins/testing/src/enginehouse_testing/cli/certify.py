"""`enginehouse certify`: what a part that a plugin brings was found to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from enginehouse.errors import UserError, nearest
from enginehouse_testing.given import KINDS, NAMED_BY_MODULE, Given

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.engines.model import Device
    from enginehouse.plugin import Record
    from enginehouse_testing.certificate import Certificate, Result

ARROW = " -> "
"""Between the names of two layouts, of what went from one to the other."""
COLOURS = {"warning": "yellow", "failed": "red"}
"""Of the outcomes that are told in full, the worse last."""


@click.command()
@click.argument("name", required=False)
@click.option("--out", "directory", type=click.Path(file_okay=False), help="Where the certificate goes.")
@click.option("--kind", type=click.Choice(KINDS), help="Only what is of this kind.")
@click.option("--layout", "layouts", multiple=True, metavar="NAME", help="Only this layout; may be repeated.")
@click.option("--check", "checks", multiple=True, metavar="NAME", help="Only this check; may be repeated.")
@click.option("--runtime", default="auto", metavar="auto|NAME|PATH", help="The runtime of a rollout backend.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="What an engine runs on; auto: a GPU where there is one that it can use.",
)
@click.option("--quick", is_flag=True, help="Only the first layout, and the few checks that find most: begin with it.")
@click.option("--fail-fast", is_flag=True, help="End with the first check that fails.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Longest a check's act may take."
)
@click.option("--arguments", metavar="YAML", help="Arguments as of a config, of what is no engine: {clip: 0.3}.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=row|token",
    help="A further column that a loss or an advantage reads; may be repeated.",
)
@click.option(
    "--examples",
    type=click.Path(dir_okay=False),
    metavar="FILE.jsonl",
    help="Rows of data for a reward, each with a response and, if you like, the reward it is to get; for an "
    "environment, tasks.",
)
@click.option("--list", "is_list", is_flag=True, help="List the checks, and run none.")
@click.option(
    "--verify",
    type=click.Path(dir_okay=False),
    metavar="CERTIFICATE.json",
    help="Say whether a certificate passed and is of what is installed, and check nothing. It is not signed: whoever "
    "can write the file can make it say anything.",
)
def certify(
    name: str | None,
    directory: str | None,
    kind: str | None,
    layouts: tuple[str, ...],
    checks: tuple[str, ...],
    runtime: str,
    device: str,
    quick: bool,
    fail_fast: bool,
    timeout: float | None,
    arguments: str | None,
    columns: tuple[str, ...],
    examples: str | None,
    is_list: bool,
    verify: str | None,
) -> None:
    """Check that NAME does what it promises: an engine or weight transport at every layout it declares; or a loss,
    advantage, reward, tracker or environment, which --kind may name by module:attribute, too.

    Writes certificate.json and certificate.md, anew after each check: what is interrupted says so, and never passes.
    Of a name of several kinds, a training and a rollout backend say, all are checked, each into a folder of its own.
    With --layout, --check or --quick only a part is run, and the certificate does not say that the backend passed.

    With two cores a rollout engine takes about a minute a layout, a large one, which is launched several times, ten; a
    training engine takes two minutes a layout. Begin with the first of these lines; an act that hangs costs 180 s of a
    training engine, 600 s of a rollout engine, launch included, or what --timeout says.

    \b
    enginehouse certify mine --out /tmp/mine --quick --fail-fast --timeout 60
    enginehouse certify torch --out certificates/torch
    enginehouse certify vllm --out certificates/vllm
    enginehouse certify fsdp --out /tmp/fsdp --layout tp2 --check logprobs --check gradients
    enginehouse certify my_losses:my_loss --kind loss --arguments '{clip: 0.3}' --out /tmp/loss
    enginehouse certify --verify /tmp/loss/certificate.json

    Exit codes: 0 everything asked for passed (checks that need GPUs this machine lacks are listed as not run),
    or the certificate passed and is of what is installed; 1 something failed, or the certificate did not or is not; 2 a
    mistake in the command; 130 interrupted.
    """
    from rich.console import Console

    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse_testing.unwritten import unwritten

    if verify is not None:
        sys.exit(_verify(Path(verify)))
    if is_list:
        _list(name, kind)
        return
    if name is None or directory is None:
        raise UserError("certify takes a NAME and --out DIRECTORY; or --list; or --verify CERTIFICATE.json")
    if quick and checks:
        raise UserError("--quick chooses the checks; leave out --check, or --quick")
    records = _records(name, kind, layouts or None, checks or None)
    given = _given(arguments, columns, examples)
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
                certificate = _run(record, where, *chosen, runtime, device, timeout, fail_fast, given, console)
        except (KeyboardInterrupt, SystemExit):
            click.echo(f"Interrupted. What was found until then is in {where / 'certificate.json'}", err=True)
            sys.exit(EXIT_CODE)
        _show(certificate, console)
        click.echo(f"{record.name} ({record.kind}): {certificate.verdict()}. {where / 'certificate.json'}")
        clean = clean and certificate.clean
        if fail_fast and not clean:
            break
    sys.exit(0 if clean else 1)


def _records(name: str, kind: str | None, layouts: Sequence[str] | None, checks: Sequence[str] | None) -> list[Record]:
    """What a name stands for, of every kind that has the layouts and checks asked for.

    Raises:
        UserError: there is nothing of that name, or no such layout or check.
    """
    from enginehouse.plugin import KINDS as RECORDS
    from enginehouse.plugin import PluginLookupError, plugins
    from enginehouse_testing.naming import record_of
    from enginehouse_testing.running import cases

    found = plugins()
    if not found.is_name(name) and kind is None:
        raise UserError(f"what {name!r} is, is not known: say --kind {', '.join(NAMED_BY_MODULE)}")
    there = [one for one in KINDS if one in {record.kind for record in RECORDS}]
    kinds = [kind] if kind else [one for one in there if found.providers(one, name)]
    if not kinds:
        known = {record.name for one in there for record in found.all(one)}
        try:
            found.get("train", name)  # it may be of a plugin that could not be loaded
        except PluginLookupError as error:
            if error.reason != "unknown":
                raise
        raise UserError(f"nothing that has a suite is called {name!r}; {nearest(name, known)}")
    records = [record_of(one, name) for one in kinds]
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


def _given(arguments: str | None, columns: Sequence[str], examples: str | None) -> Given:
    """What the command says of what is tried.

    Raises:
        UserError: it cannot be read.
    """
    import yaml

    try:
        named = yaml.safe_load(arguments) if arguments else {}
    except yaml.YAMLError as error:
        raise UserError(f"--arguments cannot be read: {error}") from error
    if not isinstance(named, dict):
        raise UserError(f"--arguments are to be a mapping, {{clip: 0.3}} say, not {arguments!r}")
    made: dict[str, Any] = {}
    for column in columns:
        name, _, of = column.partition("=")
        if of not in ("row", "token"):
            raise UserError(f"--column {column}: write NAME=row, or NAME=token")
        made[name] = of
    return Given(arguments=named, columns=made, examples=_rows(Path(examples)) if examples else ())


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--examples {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"--examples {path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"--examples {path}, line {number} is no JSON object")
        rows.append(row)
    if not rows:
        raise UserError(f"--examples {path} has no line")
    return rows


def _verify(path: Path) -> int:
    """Say whether a certificate passed and is of what is installed; the exit code."""
    from enginehouse_testing.verifying import differences, read_certificate

    certificate = read_certificate(path)
    found = differences(certificate)
    failed = any(one.get("outcome") == "failed" for one in certificate["checks"])
    said = "failed" if failed else "passed" if certificate["passed"] else "interrupted, or not the whole suite"
    click.echo(f"{certificate['kind']} {certificate['backend']}, written {certificate['written']}: {said}")
    for line in found:
        click.echo(line)
    click.echo("It is not of what is installed." if found else "It is of what is installed.")
    return 0 if certificate["passed"] and not found else 1


def _list(name: str | None, kind: str | None) -> None:
    """List the checks of a kind, of a name's kinds, or of all."""
    from enginehouse_testing.checks import checks_of

    kinds = [kind] if kind else [record.kind for record in _records(name, None, None, None)] if name else KINDS
    for one in kinds:
        click.echo(f"{one}:")
        for check in checks_of(one):
            of = "" if check.capability == "protocol" else f" [{check.capability}]"
            click.echo(f"  {check.name}{of}: {check.claim}")


def _quick(record: Record, layouts: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Layouts and checks of a first look: one layout, unless others are asked for, and what finds most."""
    from enginehouse_testing.running import QUICK, layouts_of

    return layouts or [layouts_of(record)[0].name], QUICK[record.kind]


def _run(
    record: Record,
    directory: Path,
    layouts: Sequence[str] | None,
    checks: Sequence[str] | None,
    runtime: str,
    device: str,
    timeout: float | None,
    fail_fast: bool,
    given: Given,
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
            if result.outcome in COLOURS:
                told = f"    {result.outcome}: {result.detail}"
                console.print(told, style=COLOURS[result.outcome], markup=False, highlight=False)
        said = len(certificate.checks)

    return run(
        record,
        layouts=layouts,
        checks=checks,
        runtime=runtime,
        device=None if device == "auto" else cast("Device", device),
        timeout=timeout,
        fail_fast=fail_fast,
        given=given,
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
            worst = max(
                moved,
                key=lambda one: (
                    list(COLOURS).index(one.outcome) if one.outcome in COLOURS else -1,
                    one.measured or 0.0,
                ),
                default=None,
            )
            cells.append(_cell(worst))
        tolerance = found[0].tolerance
        table.add_row(name, f"{tolerance:g}" if tolerance else "exact", *cells)
    console.print(table)


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome == "passed":
        return f"[green]{result.measured:.1e}[/]" if result.measured else "[green]equal[/]"
    if result.outcome in COLOURS:
        return f"[bold {COLOURS[result.outcome]}]{result.outcome.upper()}[/]"
    return f"[dim]{result.outcome}[/]"
