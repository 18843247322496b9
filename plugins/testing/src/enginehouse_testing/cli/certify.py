"""`enginehouse certify`: checks that a part of a plugin does what it promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginehouse.errors import UserError, nearest
from enginehouse_testing.cli.model_options import model_options
from enginehouse_testing.given import KINDS, NAMED_BY_MODULE, Given
from enginehouse_testing.model_under_test import TINY, choose_model

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.plugin import Record
    from enginehouse_testing.certificate import Certificate, Result
    from enginehouse_testing.model_under_test import ModelUnderTest

ARROW = " -> "
"""Text between the names of two layouts if a checkpoint went from one to the other."""
COLOURS = {"warning": "yellow", "failed": "red"}
"""Colours of the outcomes that are shown in full, the worst last."""


def _verify(context: click.Context, option: click.Parameter, path: str | None) -> None:
    """Say whether a certificate passed and matches the installed software, and exit."""
    from enginehouse_testing.verifying import differences, read_certificate

    if path is None:
        return
    certificate = read_certificate(Path(path))
    lines = differences(certificate)
    failed = any(check.get("outcome") == "failed" for check in certificate["checks"])
    verdict = "failed" if failed else "passed" if certificate["passed"] else "interrupted, or not the whole suite"
    model = f" of {certificate['model']}" if certificate.get("model") else ""
    click.echo(f"{certificate['kind']} {certificate['backend']}{model}, written {certificate['written']}: {verdict}")
    for line in lines:
        click.echo(line)
    click.echo(f"It {'does not match' if lines else 'matches'} the installed software.")
    sys.exit(0 if certificate["passed"] and not lines else 1)


@click.command()
@click.argument("name", required=False)
@click.option("--out", "directory", type=click.Path(file_okay=False), help="Directory for the certificate.")
@click.option("--kind", type=click.Choice(KINDS), help="Kind of NAME to check; unset: all its kinds.")
@click.option(
    "--layout", "layouts", multiple=True, metavar="NAME", help="Layout to check; may be repeated; unset: all layouts."
)
@click.option(
    "--check", "checks", multiple=True, metavar="NAME", help="Check to run; may be repeated; unset: all checks."
)
@click.option(
    "--runtime", default="auto", metavar="auto|NAME|PATH", help="Runtime (Python environment) of a rollout engine."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Device of the engine; auto: a GPU if the engine can use one.",
)
@model_options
@click.option(
    "--options",
    "engine_options",
    metavar="YAML",
    help="Options of an engine, which replace those of its layouts: {quantization: fp8}.",
)
@click.option("--quick", is_flag=True, help="Run only the most useful checks, at the first layout.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first check that fails.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit for each operation of a check; unset: 180 for a training engine, 600 for a rollout engine.",
)
@click.option(
    "--arguments", metavar="YAML", help="Arguments of a loss, advantage, reward, tracker or environment: {clip: 0.3}."
)
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="NAME=row|token",
    help="Additional column that a loss or an advantage reads; may be repeated.",
)
@click.option(
    "--examples",
    type=click.Path(dir_okay=False),
    metavar="FILE.jsonl",
    help="Rows for a reward, each with a response and optionally the expected reward; or tasks for an environment.",
)
@click.option("--list", "is_list", is_flag=True, help="List the checks without running them.")
@click.option(
    "--verify",
    type=click.Path(dir_okay=False),
    metavar="CERTIFICATE.json",
    callback=_verify,
    expose_value=False,
    help="Certificate to compare with the installed software, instead of running checks. A certificate is not signed.",
)
def certify(
    name: str | None,
    directory: str | None,
    kind: str | None,
    layouts: tuple[str, ...],
    checks: tuple[str, ...],
    engine_options: str | None,
    quick: bool,
    arguments: str | None,
    columns: tuple[str, ...],
    examples: str | None,
    is_list: bool,
    **how: Any,
) -> None:
    """Check that a plugin does what it declares.

    NAME is an engine, weight transport, loss, advantage, reward, tracker or environment; with --kind it may also be
    module:attribute. The command writes certificate.json and certificate.md.

    \b
    enginehouse certify mine --out /tmp/mine --quick --fail-fast --timeout 60
    enginehouse certify --verify /tmp/mine/certificate.json

    Exit codes: 0 passed, 1 failed, 2 a mistake in the command, 130 interrupted. Suites, models and certificates:
    plugins/testing/README.md.
    """
    if is_list:
        _list(name, kind)
        return
    if name is None or directory is None:
        raise UserError("certify takes a NAME and --out DIRECTORY; or --list; or --verify CERTIFICATE.json")
    if quick and checks:
        raise UserError("--quick chooses the checks; leave out --check, or --quick")
    under_test = choose_model(how.pop("model"), how.pop("dtype"), how.pop("layers"))
    records = _find_records(name, kind, layouts or None, checks or None, under_test)
    given = _read_given(arguments, columns, examples)
    if under_test != TINY:
        click.echo(f"model: {under_test}")
    options = _read_mapping("--options", engine_options, "{quantization: fp8}")
    if options and len(records) > 1:
        several = " or ".join(record.kind for record in records)
        raise UserError(f"--options are for one engine, but {name!r} is several: add --kind {several}")
    how |= {"layouts": layouts or None, "checks": checks or None, "given": given, "model": under_test}
    how["options"] = options
    sys.exit(0 if _certify_all(records, Path(directory), quick, how) else 1)


def _find_records(
    name: str,
    kind: str | None,
    layouts: Sequence[str] | None = None,
    checks: Sequence[str] | None = None,
    model: ModelUnderTest = TINY,
) -> list[Record]:
    """Return the records that have a name, one of each kind. Records without the chosen layouts or checks are left out.

    Raises:
        UserError: nothing has the name, or a layout or check does not exist.
    """
    from enginehouse.plugin import KINDS as RECORDS
    from enginehouse.plugin import PluginLookupError, plugins
    from enginehouse_testing.naming import record_of
    from enginehouse_testing.running import cases

    manager = plugins()
    if not manager.is_name(name) and kind is None:
        raise UserError(f"{name!r} does not say its kind: add --kind, one of {', '.join(NAMED_BY_MODULE)}")
    all_kinds = [candidate for candidate in KINDS if candidate in {record.kind for record in RECORDS}]
    kinds = [kind] if kind else [candidate for candidate in all_kinds if manager.providers(candidate, name)]
    if not kinds:
        names = {record.name for candidate in all_kinds for record in manager.all(candidate)}
        try:
            manager.get("train", name)  # the name may belong to a plugin that could not be loaded
        except PluginLookupError as error:
            if error.reason != "unknown":
                raise
        raise UserError(f"unknown name {name!r}. {nearest(name, names)}")
    fitting, errors = [], []
    for record in [record_of(chosen, name) for chosen in kinds]:
        try:
            cases(record, layouts, checks, model)
            fitting.append(record)
        except UserError as error:
            errors.append(error)
    if not fitting:
        raise errors[0]
    return fitting


def _read_given(arguments: str | None, columns: Sequence[str], examples: str | None) -> Given:
    """Read the arguments and data of the command line.

    Raises:
        UserError: the arguments or data cannot be read.
    """
    mapping = _read_mapping("--arguments", arguments, "{clip: 0.3}")
    places: dict[str, Any] = {}
    for column in columns:
        name, _, place = column.partition("=")
        if place not in ("row", "token"):
            raise UserError(f"--column must be NAME=row or NAME=token, not {column}")
        places[name] = place
    return Given(arguments=mapping, columns=places, examples=_read_rows(Path(examples)) if examples else ())


def _read_mapping(option: str, text: str | None, example: str) -> dict[str, Any]:
    """Read a mapping in YAML; empty if there is no text. Raises `UserError` if the text is something else."""
    import yaml

    try:
        mapping = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        raise UserError(f"{option} cannot be read: {error}") from error
    if not isinstance(mapping, dict):
        raise UserError(f"{option} must be a mapping such as {example}, not {text!r}")
    return mapping


def _read_rows(path: Path) -> list[dict[str, Any]]:
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
            raise UserError(f"--examples {path}, line {number} is not a JSON object")
        rows.append(row)
    if not rows:
        raise UserError(f"--examples {path} is empty")
    return rows


def _list(name: str | None, kind: str | None) -> None:
    """List the checks of `kind`. Without a kind, list the checks of every kind that has a record called `name`. Without
    either, list all checks."""
    from enginehouse_testing.checks import checks_of

    kinds = [kind] if kind else [record.kind for record in _find_records(name, None)] if name else KINDS
    for listed in kinds:
        click.echo(f"{listed}:")
        for check in checks_of(listed):
            capability = "" if check.capability == "protocol" else f" [{check.capability}]"
            click.echo(f"  {check.name}{capability}: {check.claim}")


def _say_unwritten(record: Record) -> bool:
    """Name the methods that are yet to be written; return True if there are any."""
    from enginehouse_testing.unwritten import unwritten

    missing = unwritten(record)
    if missing:
        click.echo("\n".join(map(str, missing)))
        click.echo(f"{record.name} ({record.kind}): nothing was checked, {len(missing)} methods are yet to be written")
    return bool(missing)


def _choose_quick(record: Record, layouts: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """Return the first layout, unless layouts are chosen, and the checks that find most mistakes."""
    from enginehouse_testing.running import QUICK, layouts_of

    return {"layouts": layouts or [layouts_of(record)[0].name], "checks": QUICK[record.kind]}


def _certify_all(records: Sequence[Record], directory: Path, quick: bool, how: Mapping[str, Any]) -> bool:
    """Run the suite of each record; return True if all ran and none failed. Several records get a folder each."""
    clean = True
    for record in records:
        if not how["checks"] and _say_unwritten(record):
            clean = False
            continue
        chosen = _choose_quick(record, how["layouts"]) if quick else {}
        where = directory / record.kind if len(records) > 1 else directory
        clean = _certify(record, where, {**how, **chosen}) and clean
        if how["fail_fast"] and not clean:
            break
    return clean


def _certify(record: Record, directory: Path, how: Mapping[str, Any]) -> bool:
    """Run a suite and show its results; `how` are arguments of `enginehouse_testing.running.certify`.

    The certificate is written after each case. Return True if everything chosen has run and nothing failed.
    """
    from rich.console import Console

    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse_testing.running import Case, certify

    console = Console() if sys.stdout.isatty() else Console(width=140)
    shown = 0

    def begins(case: Case, number: int, of: int) -> None:
        console.print(f"[dim]{number:>{len(str(of))}}/{of}[/] {case.check.name} [dim]{case.layout}[/]", highlight=False)

    def ended(certificate: Certificate) -> None:
        nonlocal shown
        certificate.write(directory)
        for result in certificate.checks[shown:]:
            if result.outcome in COLOURS:
                line = f"    {result.outcome}: {result.detail}"
                console.print(line, style=COLOURS[result.outcome], markup=False, highlight=False)
        shown = len(certificate.checks)

    device = None if how["device"] == "auto" else how["device"]
    try:
        with Interrupts(lambda: None):
            certificate = certify(record, **{**how, "device": device}, begins=begins, ended=ended)
    except (KeyboardInterrupt, SystemExit):
        click.echo(f"Interrupted. The results so far are in {directory / 'certificate.json'}", err=True)
        sys.exit(EXIT_CODE)
    _show(certificate, console)
    click.echo(f"{record.name} ({record.kind}): {certificate.verdict()}. {directory / 'certificate.json'}")
    return certificate.clean


def _show(certificate: Certificate, console: Console) -> None:
    """Print a table: a row for each check, and a column for each layout.

    Some checks save a checkpoint in one layout and load it in another. A last column, `between`, shows the worst result
    of such a check over all pairs of layouts.
    """
    from rich.table import Table

    results = certificate.checks
    layouts = list(dict.fromkeys(result.layout for result in results if result.layout and ARROW not in result.layout))
    between = any(ARROW in result.layout for result in results)
    table = Table("check", "at most", *layouts, *(["between"] if between else []), box=None)
    for name in dict.fromkeys(result.name for result in results):
        check_results = [result for result in results if result.name == name]
        by_layout = {result.layout: result for result in check_results}
        cells = [_cell(by_layout.get(layout, by_layout.get(""))) for layout in layouts]
        if between:
            cells.append(
                _cell(max((result for result in check_results if ARROW in result.layout), key=_badness, default=None))
            )
        tolerance = check_results[0].tolerance
        table.add_row(name, f"{tolerance:g}" if tolerance else "exact", *cells)
    console.print(table)


def _badness(result: Result) -> tuple[int, float]:
    return list(COLOURS).index(result.outcome) if result.outcome in COLOURS else -1, result.measured or 0.0


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome == "passed":
        return f"[green]{result.measured:.1e}[/]" if result.measured else "[green]equal[/]"
    if result.outcome in COLOURS:
        return f"[bold {COLOURS[result.outcome]}]{result.outcome.upper()}[/]"
    return f"[dim]{result.outcome}[/]"
