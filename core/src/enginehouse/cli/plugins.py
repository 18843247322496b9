"""`enginehouse plugins list|show`: the installed plugins, their states and their declarations.

The commands import neither torch nor ray nor an engine. `show` imports an engine's options to print their schema, and a
function to print its arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from enginehouse import __version__
from enginehouse.cli.console import colour_state, escape, terminal
from enginehouse.cli.main import Lazy, LazyGroup, refuse_tool_command
from enginehouse.plugin import (
    CONTRACT,
    KINDS,
    Backend,
    Environment,
    Function,
    Loss,
    Plugin,
    PluginManager,
    Provided,
    Record,
    Reward,
    Tracker,
)
from enginehouse.plugin import plugins as loaded_plugins
from enginehouse.plugin.discovery import read_switches
from enginehouse.plugin.first_party import pip_line
from enginehouse.plugin.lookup import ambiguous_error, cure_line, label, unknown_name_error
from enginehouse.plugin.manager import load_switched
from enginehouse.plugin.observers import EVENTS, PREFIX
from enginehouse.runtimes.readiness import plugin_state, runtime_instead

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.plugin.arguments import Argument
    from enginehouse.plugin.options_schema import Option

ARGUED = (Function, Environment, Tracker)
"""Types of records whose arguments a config gives by name."""


class _Group(click.Group):
    """The commands of `enginehouse plugins`, including `doctor` from enginehouse-testing.

    To find `doctor`, the group loads only that package. Any other plugin may be broken and end the process that loads
    it.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *(["doctor"] if self._doctor() else [])])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name != "doctor":
            return super().get_command(ctx, cmd_name)
        if (doctor := self._doctor()) is None:
            refuse_tool_command("plugins doctor")
        return doctor and doctor.load()

    def _doctor(self) -> Lazy | None:
        group = LazyGroup()
        manager = load_switched(replace(read_switches(), enabled=("testing",)))
        manager.add_commands(group, of_enginehouse=False)
        return group.lazy.get("plugins doctor")


@click.group(cls=_Group)
def plugins() -> None:
    """List the installed engines and other plugins."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every field.")
@click.option(
    "--kind", type=click.Choice([kind.kind for kind in KINDS]), help="Kind of record to list; unset: all kinds."
)
def list_(as_json: bool, kind: str | None) -> None:
    """List the plugins, the engines that they provide, and their states.

    The command imports no engine. To check whether plugins work, use `enginehouse plugins doctor`.
    """
    manager = loaded_plugins()
    if as_json:
        click.echo(json.dumps(_as_json(manager, kind), indent=2, default=dict))
    else:
        _show_table(manager, kind)


@plugins.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Show the details of NAME.

    NAME is a plugin, a package, an engine, or anything else that a plugin declares.

    \b
    enginehouse plugins show vllm             an engine with its options
    enginehouse plugins show clipped_policy   a loss with its arguments
    """
    manager = loaded_plugins()
    matches = [
        plugin for plugin in manager.plugins if plugin.name == name or (plugin.answers_to(name) and not plugin.internal)
    ]
    providers = [] if matches else manager.providers(name=name)
    if not matches and not providers:
        raise unknown_name_error(name, manager.plugins, manager.providers())
    for plugin in matches:
        _show_plugin(manager, plugin)
    for provided in providers:
        _show_record(manager, provided)
        if isinstance(provided.record, ARGUED):
            _show_arguments(provided.record)


def record_state(manager: PluginManager, provided: Provided) -> tuple[str, str]:
    """Return a record's state and a line that explains it. The line is empty if this environment meets all
    requirements."""
    record, plugin = provided
    missing = manager.missing(record)
    if not missing:
        return "ok", ""
    if runtime := runtime_instead(manager, record):
        return "ok", f"in runtime {runtime}"
    return "requirements missing", f"{'; '.join(map(str, missing))}; try `{cure_line(record, plugin, missing)}`"


def _problems(manager: PluginManager, kind: str | None) -> Iterator[tuple[str, str]]:
    """Yield each plugin or record that has a problem, with the problem in one line."""
    for plugin in manager.plugins:
        owner = f"{plugin.name} ({plugin.distribution})"
        if plugin.problem:
            yield owner, f"{plugin.status}: {plugin.problem}"
        if plugin.note:
            yield owner, plugin.note
    lines: set[str] = set()
    for provided in manager.providers(kind):
        state, why = record_state(manager, provided)
        line = f"{state}: {why}"
        # a plugin's training and rollout engine often lack the same requirement
        if state != "ok" and line not in lines and not provided.plugin.internal:
            lines.add(line)
            yield f"{provided.record.name} ({provided.plugin.distribution})", line
    for record_kind, name in sorted({(record.kind, record.name) for record, _ in manager.providers(kind)}):
        providers = manager.providers(record_kind, name)
        if len(providers) > 1:
            yield name, str(ambiguous_error(record_kind, name, providers))


def _show_table(manager: PluginManager, kind: str | None) -> None:
    from rich.table import Table

    console = terminal()
    backends = [
        (provided, record) for provided in manager.providers(kind) if isinstance(record := provided[0], Backend)
    ]
    wide = console.width >= 110  # a narrow terminal shows capabilities below the table
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("engine", "kind", "distribution", "version", "contract"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("state", *(["capabilities"] if wide else [])):
        table.add_column(column, overflow="fold")
    below = Table(box=None, show_header=False, pad_edge=False)
    for provided, record in backends:
        plugin = provided.plugin
        state, _ = record_state(manager, provided)
        capabilities = ", ".join(sorted(record.capabilities))
        cells = [record.name, record.kind, plugin.distribution, plugin.version, plugin.protocol, colour_state(state)]
        table.add_row(*cells, *([capabilities] if wide else []))
        if capabilities and not wide:
            below.add_row(f"[bold]{record.name}[/] {record.kind}", capabilities)
    for plugin in manager.plugins:
        if plugin.status != "ok":
            name = escape(f"({plugin.name})")
            table.add_row(name, "", plugin.distribution, plugin.version, plugin.protocol, colour_state(plugin.status))
    if table.row_count:
        console.print(table)
    all_ok = all(plugin.status == "ok" for plugin in manager.plugins)
    if all_ok and not (manager.all("train") or manager.all("rollout")) and kind in (None, "train", "rollout"):
        console.print(f"No engine is installed. Try: {escape(pip_line('torch'))}")
    for word, names in _others(manager, kind).items():
        below.add_row(f"[bold]{word}[/]", escape(", ".join(names)))
    if below.row_count:
        console.print()
        console.print(below)
    problems = list(_problems(manager, kind))
    if problems:
        console.print("\n[bold]problems[/]  (details: enginehouse plugins show NAME, enginehouse plugins doctor)")
        for what, problem in problems:
            console.print(f"  {escape(what)}: {escape(problem)}")


def _others(manager: PluginManager, kind: str | None) -> dict[str, list[str]]:
    """Return the names of all records except engines, by kind, and the names of observed events. A name is followed by
    its distribution, unless that is core."""
    names: dict[str, list[str]] = {}
    for record, plugin in manager.providers(kind):
        if not isinstance(record, Backend):
            owner = "" if plugin.internal else f" ({plugin.distribution})"
            names.setdefault(label(record.kind), []).append(record.name + owner)
    for plugin in () if kind else manager.plugins:
        for event in _observed_events(plugin):
            names.setdefault("observer", []).append(f"{event} ({plugin.distribution})")
    return names


def _observed_events(plugin: Plugin) -> list[str]:
    names = (hook.removeprefix(PREFIX) for hook in plugin.hooks)
    return [name for name in names if name in EVENTS]


def _show_plugin(manager: PluginManager, plugin: Plugin) -> None:
    console = terminal()
    _print_heading(console, plugin.name, f"plugin of {plugin}")
    _print_fields(
        console,
        {
            "module": plugin.module,
            "contract": plugin.protocol,
            "state": colour_state(plugin_state(manager, plugin)),
            "problem": escape(plugin.problem),
            "note": escape(plugin.note),
            "observes": ", ".join(_observed_events(plugin)),
        },
    )
    if plugin.traceback:
        console.print(escape(plugin.traceback.rstrip()), highlight=False)
    for record in plugin.records:
        _show_record(manager, Provided(record, plugin))


def _show_record(manager: PluginManager, provided: Provided) -> None:
    console = terminal()
    record, plugin = provided
    state, why = record_state(manager, provided)
    _print_heading(console, record.name, f"{label(record.kind)} of {plugin}")
    fields = {
        "summary": escape(record.summary),
        "state": colour_state(state) + (f": {escape(why)}" if why else ""),
    }
    for field in dataclasses.fields(record):
        if field.name not in ("name", "summary"):
            fields[field.name] = escape(_text(getattr(record, field.name)))
    _print_fields(console, fields)
    if isinstance(record, Backend):
        _show_options(console, record)


def _show_options(console: Console, backend: Backend) -> None:
    from enginehouse.plugin import ResolveError, resolve
    from enginehouse.plugin.options_schema import describe_options

    try:
        options = describe_options(resolve(backend.options))
    except ResolveError as error:
        console.print(f"  options cannot be shown: {escape(str(error))}")
        return
    _print_rows(console, "option", options)


def _show_arguments(record: Function | Environment | Tracker) -> None:
    """Import the record's function, and show the arguments that a config may give it."""
    from enginehouse.plugin import ResolveError, resolve
    from enginehouse.plugin.arguments import KL_ARGUMENTS, arguments_of

    console = terminal()
    if not record.references:  # a stage that has only a model
        return
    try:
        function = resolve(getattr(record, record.references[0]))
    except ResolveError as error:
        console.print(f"  arguments cannot be shown: {escape(str(error))}")
        return
    arguments = arguments_of(function, positional=0 if isinstance(record, Reward | Environment | Tracker) else 1)
    set_by = KL_ARGUMENTS if isinstance(record, Loss) else {}
    arguments = [
        argument._replace(description=f"{argument.description} Set by {set_by[argument.name]}.".lstrip())
        if argument.name in set_by
        else argument
        for argument in arguments
    ]
    if first := (inspect.getdoc(function) or "").partition("\n")[0]:
        console.print(f"  {escape(first)}")
    _print_rows(console, "argument or column" if isinstance(record, Reward) else "argument", arguments)


def _print_rows(console: Console, what: str, rows: Iterable[Option | Argument]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=True)
    for column in (what, "type", "default", "description"):
        table.add_column(column, overflow="fold", no_wrap=column == what)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _as_json(manager: PluginManager, kind: str | None) -> dict[str, Any]:
    return {
        "enginehouse": __version__,
        "contract": ".".join(map(str, CONTRACT)),
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "module": plugin.module,
                "internal": plugin.internal,
                "protocol": plugin.protocol,
                "state": plugin_state(manager, plugin),
                "problem": plugin.problem,
                "traceback": plugin.traceback,
                "note": plugin.note,
                "observes": _observed_events(plugin),
                "records": [
                    _record_as_json(record, *record_state(manager, Provided(record, plugin)))
                    for record in plugin.records
                    if kind is None or record.kind == kind
                ],
            }
            for plugin in manager.plugins
        ],
    }


def _record_as_json(record: Record, state: str, problem: str) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
    return {"kind": record.kind, "state": state, "problem": problem, **plain}


def _print_heading(console: Console, name: str, what: str) -> None:
    console.print(f"\n[bold]{escape(name)}[/]  {escape(what)}")


def _print_fields(console: Console, fields: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=True)
    for name, text in fields.items():
        if text:
            table.add_row(name, text)
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "\n".join(f"{name}: {_text(part)}" for name, part in value.items())
    return str(value)
