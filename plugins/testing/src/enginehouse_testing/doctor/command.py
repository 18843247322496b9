"""`enginehouse plugins doctor`: checks that plugins can do what they declare, and shows what a run would choose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from enginehouse.cli.console import escape, terminal

if TYPE_CHECKING:
    from enginehouse_testing.doctor.examination import ExaminationReport, Finding, PluginReport, RecordReport

COLOURS = {"ok": "green", "note": "yellow", "requirements missing": "yellow", "blocked": "dim"}


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every field.")
def doctor(name: str | None, as_json: bool) -> None:
    """Examine the plugin or engine NAME, or all plugins.

    NAME may also be a package. A separate process imports what each plugin declares. It checks that the plugin loads
    and fits the contract, that its engines, options and functions can be called as required, and that requirements are
    installed here and in each runtime. Each finding names its place and a command that helps.

    Exit codes: 0 nothing is wrong (there may be notes), 1 something is wrong, 2 NAME is unknown.
    """
    from rich.console import Console

    from enginehouse_testing.doctor.examination import examine_plugins

    screen = Console(stderr=True, highlight=False)
    with screen.status("") as status:

        def begins(what: str, number: int, of: int) -> None:
            status.update(f"examining {escape(what)} {number}/{of}")

        report = examine_plugins(name, begins)
    if as_json:
        content = {**asdict(report), "wrong": report.count("wrong"), "notes": report.count("note")}
        click.echo(json.dumps(content, indent=2, default=dict))
    else:
        console = terminal()
        for line in _lines(report):
            console.print(line, soft_wrap=True)
    if report.count("wrong"):
        sys.exit(1)


def _lines(report: ExaminationReport) -> Iterator[str]:
    yield f"[bold]here[/]  contract {report.contract}, device {report.device.name} ({escape(report.device.why)})"
    for plugin in report.plugins:
        yield ""
        yield from _plugin_lines(plugin)
    if report.transports:
        yield "\n[bold]weight transports[/]"
    for where in dict.fromkeys(pair.where for pair in report.transports):
        here = [pair for pair in report.transports if pair.where == where]
        for transport in dict.fromkeys(pair.transport.name for pair in here):
            pairs = [f"{pair.train} with {pair.rollout}" for pair in here if pair.transport.name == transport]
            listed = f"all {len(here)} pairs" if len(pairs) == len(here) > 3 else ", ".join(pairs)
            yield f"  {where}: [bold]{escape(transport or 'none')}[/] ({escape(listed)})"
    for finding in report.findings:
        yield from _finding_lines(finding)
    findings, notes = report.count("wrong"), report.count("note")
    wrong = sum(_is_wrong(plugin) for plugin in report.plugins)
    counted = f"{wrong if findings else 'nothing'} wrong"
    counted += f" ({findings} findings)" if findings > max(wrong, 1) else ""
    counted += f", {notes} {'note' if notes == 1 else 'notes'}" if notes else ""
    examined = "1 plugin" if len(report.plugins) == 1 else f"{len(report.plugins)} plugins"
    yield f"\n{examined} examined: {counted}"


def _is_wrong(plugin: PluginReport) -> bool:
    return any(finding.severity == "wrong" for finding in plugin.findings)


def _plugin_lines(plugin: PluginReport) -> Iterator[str]:
    state = "wrong" if _is_wrong(plugin) and plugin.state == "ok" else plugin.state
    yield f"[bold]{escape(plugin.name)}[/]  {escape(plugin.distribution)} {escape(plugin.version)}  {_coloured(state)}"
    facts = [f"contract {plugin.protocol}"] if plugin.protocol else []
    if plugin.loading:
        facts.append(f"loaded in {plugin.loading.seconds:.2f} s")
    if facts:
        yield f"  {escape(', '.join(facts))}"
    for record in plugin.records:
        yield from _record_lines(record)
    for finding in plugin.findings:
        yield from _finding_lines(finding)


def _record_lines(record: RecordReport) -> Iterator[str]:
    able = f": {', '.join(record.capabilities)}" if record.capabilities else ""
    yield f"  {record.kind} [bold]{escape(record.name)}[/]{escape(able)}"
    if record.runtime is None:
        return
    where = "this environment" if record.runtime.name == "current" else record.runtime.name or "nowhere"
    yield f"      runs in {escape(where)} ({escape(record.runtime.why)}), on {escape(' and '.join(record.devices))}"
    for runtime in record.environments if len(record.environments) > 1 or record.runtime.name != "current" else ():
        problem = f": {runtime.problem}" if runtime.problem else ""
        yield f"      {escape(runtime.name)} {_coloured(runtime.state)}{escape(problem)}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"  {_coloured(finding.severity)}: {escape(finding.what)}"
    if finding.where:
        yield f"      at {escape(finding.where)}"
    if finding.cure:
        yield f"      try: {escape(finding.cure)}"


def _coloured(state: str) -> str:
    return f"[{COLOURS.get(state, 'red')}]{state}[/]"
