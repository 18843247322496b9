"""`enginehouse plugins list|show`: what is installed, in what state, and what it offers.

Neither torch nor ray nor an engine is imported; `show` imports a backend's options, for their schema, and a function
that is asked for by its name, for its arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from enginehouse import __version__
from enginehouse.cli.console import plain, terminal
from enginehouse.plugin import (
    CONTRACT,
    KINDS,
    Advantage,
    Backend,
    Environment,
    Filter,
    Loss,
    Plugin,
    PluginManager,
    Provided,
    Reward,
    reload_plugins,
)
from enginehouse.plugin import plugins as loaded_plugins
from enginehouse.plugin.discovery import from_environment, installed
from enginehouse.plugin.first_party import pip_line
from enginehouse.plugin.lookup import ambiguous, label, not_found
from enginehouse.plugin.observers import EVENTS, PREFIX
from enginehouse.plugin.trial import try_out
from enginehouse.runtimes.readiness import plugin_state, runtime_instead

if TYPE_CHECKING:
    from rich.console import Console

    from enginehouse.cli.options_schema import Option
    from enginehouse.config.arguments import Argument

CHECKER = "enginehouse.engines.declared:problems_of"
"""What looks at a record, in the process where its plugin is tried."""

CHECK_SECONDS = 300.0
"""Longest that may take for one plugin: engines take a while to import."""

IMPORTING = "importing what it declares"
"""Begins what is wrong with all that a plugin declares."""

ARGUED = (Loss, Advantage, Reward, Filter, Environment)
"""What takes arguments by name."""

COLOURS = {"ok": "green", "requirements missing": "yellow", "blocked": "dim"}


@click.group()
def plugins() -> None:
    """Show which backends and other plugins there are."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Write JSON, with every field.")
@click.option("--kind", type=click.Choice([kind.kind for kind in KINDS]), help="Only records of this kind.")
@click.option("--check", is_flag=True, help="Import all that is declared, each plugin's in a process of its own.")
def list_(as_json: bool, kind: str | None, check: bool) -> None:
    """List plugins, the backends they bring, and their state.

    With --check, which takes some seconds, also what is wrong with what the plugins declare: engines, options and
    functions that are not there, methods that an engine lacks. The exit code is then 1 if anything is wrong, or a
    plugin is broken or incompatible.
    """
    wrong = _checked() if check else {}
    manager = reload_plugins() if check else loaded_plugins()
    if as_json:
        click.echo(json.dumps(_as_json(manager, kind, wrong), indent=2, default=dict))
    else:
        _show_table(manager, kind, wrong)
    if check and (wrong or any(plugin.status in ("broken", "incompatible") for plugin in manager.plugins)):
        sys.exit(1)


@plugins.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Show all there is to know of a plugin, a distribution, or anything a plugin declares, by NAME.

    \b
    enginehouse plugins show vllm             a backend, with its options
    enginehouse plugins show clipped_policy   a loss, an advantage, a reward or an environment, with its arguments
    """
    manager = loaded_plugins()
    named = [
        plugin for plugin in manager.plugins if plugin.name == name or (plugin.answers_to(name) and not plugin.internal)
    ]
    records = [] if named else manager.providers(name=name)
    if not named and not records:
        raise _unknown(manager, name)
    for plugin in named:
        _show_plugin(manager, plugin)
    for provided in records:
        _show_record(manager, provided)
        if isinstance(provided.record, ARGUED):
            _show_arguments(provided.record)


def _checked() -> dict[str, tuple[str, ...]]:
    """What is wrong with what installed plugins declare, by `"distribution:name"` of those with a fault.

    Each is loaded anew, in another process, which is also what is remembered of it from then on.
    """
    switches = from_environment()
    candidates = [candidate for candidate in installed() if not switches.refusal(candidate[0])]
    wrong: dict[str, tuple[str, ...]] = {}
    for candidate, loaded in zip(candidates, try_out(candidates), strict=True):
        plugin = candidate[0]
        if loaded is None or loaded.problem:
            continue
        (found,) = try_out([candidate], CHECKER, CHECK_SECONDS)
        if found and found.problem:
            wrong[f"{plugin.distribution}:{plugin.name}"] = (f"{IMPORTING}: {found.problem}",)
        elif found and found.wrong:
            wrong[f"{plugin.distribution}:{plugin.name}"] = found.wrong
    return wrong


def record_state(manager: PluginManager, provided: Provided) -> tuple[str, str]:
    """The state of one record and, where it is not `"ok"` or not so in this environment, one line on that."""
    record = provided.record
    if isinstance(record, Backend) and (missing := manager.missing(record)):
        if runtime := runtime_instead(manager, record):
            return "ok", f"in runtime {runtime}"
        cure = f"; try `enginehouse runtime create {record.name}`" if record.runtimes else ""
        return "requirements missing", "; ".join(map(str, missing)) + cure
    return "ok", ""


def _checked_state(manager: PluginManager, provided: Provided, wrong: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """As `record_state`; `"wrong"` where a check found something."""
    record, plugin = provided
    about = (f"{record.kind} {record.name!r}: ", f"{IMPORTING}: ")
    lines = [one for one in wrong.get(f"{plugin.distribution}:{plugin.name}", ()) if one.startswith(about)]
    return ("wrong", "; ".join(lines)) if lines else record_state(manager, provided)


def _problems(
    manager: PluginManager, kind: str | None, wrong: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """Yield what has a problem and the problem, one line each."""
    for plugin in manager.plugins:
        owner = f"{plugin.name} ({plugin.distribution})"
        if plugin.problem:
            yield owner, f"{plugin.status}: {plugin.problem}"
        if plugin.note:
            yield owner, plugin.note
        for line in wrong.get(f"{plugin.distribution}:{plugin.name}", ()):
            yield owner, line
    said: set[str] = set()
    for provided in manager.providers(kind):
        state, why = record_state(manager, provided)
        line = f"{state}: {why}"
        # a plugin's training and rollout backend often lack the same thing
        if state != "ok" and line not in said:
            said.add(line)
            yield f"{provided.record.name} ({provided.plugin.distribution})", line
    for record_kind, name in sorted({(one.record.kind, one.record.name) for one in manager.providers(kind)}):
        providers = manager.providers(record_kind, name)
        if len(providers) > 1:
            yield name, str(ambiguous(record_kind, name, providers))


def _show_table(manager: PluginManager, kind: str | None, wrong: Mapping[str, Sequence[str]]) -> None:
    from rich.table import Table

    console = terminal()
    backends = [(one, one.record) for one in manager.providers(kind) if isinstance(one.record, Backend)]
    # beside seven columns a narrow terminal leaves no room for capabilities: they go below
    wide = console.width >= 110
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("backend", "kind", "distribution", "version", "protocol"):
        table.add_column(column, no_wrap=True, overflow="fold")
    for column in ("state", *(["capabilities"] if wide else [])):
        table.add_column(column, overflow="fold")
    below = Table(box=None, show_header=False, pad_edge=False)
    for provided, record in backends:
        plugin = provided.plugin
        state, _ = _checked_state(manager, provided, wrong)
        capabilities = ", ".join(sorted(record.capabilities))
        cells = [record.name, record.kind, plugin.distribution, plugin.version, plugin.protocol, _coloured(state)]
        table.add_row(*cells, *([capabilities] if wide else []))
        if capabilities and not wide:
            below.add_row(f"[bold]{record.name}[/] {record.kind}", capabilities)
    for plugin in manager.plugins:
        if plugin.status != "ok":
            name = plain(f"({plugin.name})")
            table.add_row(name, "", plugin.distribution, plugin.version, plugin.protocol, _coloured(plugin.status))
    if table.row_count:
        console.print(table)
    whole = all(plugin.status == "ok" for plugin in manager.plugins)
    if whole and not (manager.all("train") or manager.all("rollout")) and kind in (None, "train", "rollout"):
        console.print(f"No engine is installed. Try: {plain(pip_line('torch'))}")
    for word, names in _others(manager, kind).items():
        below.add_row(f"[bold]{word}[/]", plain(", ".join(names)))
    if below.row_count:
        console.print()
        console.print(below)
    problems = list(_problems(manager, kind, wrong))
    if problems:
        console.print("\n[bold]problems[/]  (in full: enginehouse plugins show NAME)")
        for what, problem in problems:
            console.print(f"  {plain(what)}: {plain(problem)}")


def _others(manager: PluginManager, kind: str | None) -> dict[str, list[str]]:
    """Names of records that are no backends, by kind, and of observed events; whose they are, where not core's."""
    others: dict[str, list[str]] = {}
    for record, plugin in manager.providers(kind):
        if not isinstance(record, Backend):
            owner = "" if plugin.internal else f" ({plugin.distribution})"
            others.setdefault(label(record.kind), []).append(record.name + owner)
    for plugin in () if kind else manager.plugins:
        for event in _observed(plugin):
            others.setdefault("observer", []).append(f"{event} ({plugin.distribution})")
    return others


def _observed(plugin: Plugin) -> list[str]:
    """The events that a plugin is told of."""
    names = (hook.removeprefix(PREFIX) for hook in plugin.hooks)
    return [name for name in names if name in EVENTS]


def _show_plugin(manager: PluginManager, plugin: Plugin) -> None:
    console = terminal()
    _heading(console, plugin.name, f"plugin of {plugin}")
    _fields(
        console,
        {
            "module": plugin.module,
            "protocol": plugin.protocol,
            "state": _coloured(plugin_state(manager, plugin)),
            "problem": plain(plugin.problem),
            "note": plain(plugin.note),
            "observes": ", ".join(_observed(plugin)),
        },
    )
    if plugin.traceback:
        console.print(plain(plugin.traceback.rstrip()), highlight=False)
    for record in plugin.records:
        _show_record(manager, Provided(record, plugin))


def _show_record(manager: PluginManager, provided: Provided) -> None:
    console = terminal()
    record, plugin = provided
    state, why = record_state(manager, provided)
    _heading(console, record.name, f"{label(record.kind)} of {plugin}")
    fields = {"summary": plain(record.summary), "state": _coloured(state) + (f": {plain(why)}" if why else "")}
    for field in dataclasses.fields(record):
        if field.name not in ("name", "summary"):
            fields[field.name] = plain(_text(getattr(record, field.name)))
    _fields(console, fields)
    if isinstance(record, Backend):
        _show_options(console, record)


def _show_options(console: Console, backend: Backend) -> None:
    from enginehouse.cli.options_schema import described_options
    from enginehouse.plugin import ResolveError, resolve

    try:
        options = described_options(resolve(backend.options))
    except ResolveError as error:
        console.print(f"  options cannot be shown: {plain(str(error))}")
        return
    _table_of(console, "option", options)


def _show_arguments(record: Loss | Advantage | Reward | Filter | Environment) -> None:
    """What a config may give a loss, an advantage, a reward, a filter or an environment, which is imported."""
    from enginehouse.config.arguments import KL_ARGUMENTS, arguments_of
    from enginehouse.plugin import ResolveError, resolve

    console = terminal()
    try:
        function = resolve(getattr(record, record.references[0]))
    except ResolveError as error:
        console.print(f"  arguments cannot be shown: {plain(str(error))}")
        return
    arguments = arguments_of(function, positional=0 if isinstance(record, Reward | Environment) else 1)
    set_by = KL_ARGUMENTS if isinstance(record, Loss) else {}
    arguments = [
        one._replace(description=f"{one.description} Set by {set_by[one.name]}.".lstrip())
        if one.name in set_by
        else one
        for one in arguments
    ]
    if first := (inspect.getdoc(function) or "").partition("\n")[0]:
        console.print(f"  {plain(first)}")
    _table_of(console, "argument or column" if isinstance(record, Reward) else "argument", arguments)


def _table_of(console: Console, what: str, rows: Iterable[Option | Argument]) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=True)
    for column in (what, "type", "default", "description"):
        table.add_column(column, overflow="fold", no_wrap=column == what)
    for row in rows:
        table.add_row(*map(plain, row))
    console.print(table)


def _unknown(manager: PluginManager, name: str) -> Exception:
    """The error for a name nobody has: as for a backend that is not loaded, else with every name as a choice."""
    from enginehouse.errors import nearest
    from enginehouse.plugin import PluginLookupError

    error = not_found(None, name, manager.plugins, ())
    if error.reason != "unknown":
        return error
    names = {plugin.name for plugin in manager.plugins} | {one.record.name for one in manager.providers()}
    return PluginLookupError(f"nothing is called {name!r}; {nearest(name, names)}", "unknown")


def _as_json(manager: PluginManager, kind: str | None, wrong: Mapping[str, Sequence[str]]) -> dict[str, Any]:
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
                "observes": _observed(plugin),
                "wrong": list(wrong.get(f"{plugin.distribution}:{plugin.name}", ())),
                "records": [
                    _record_as_json(Provided(record, plugin), *_checked_state(manager, Provided(record, plugin), wrong))
                    for record in plugin.records
                    if kind is None or record.kind == kind
                ],
            }
            for plugin in manager.plugins
        ],
    }


def _record_as_json(provided: Provided, state: str, problem: str) -> dict[str, Any]:
    fields = dataclasses.asdict(provided.record)
    plain = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
    return {"kind": provided.record.kind, "state": state, "problem": problem, **plain}


def _heading(console: Console, name: str, what: str) -> None:
    console.print(f"\n[bold]{plain(name)}[/]  {plain(what)}")


def _fields(console: Console, fields: dict[str, str]) -> None:
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


def _coloured(state: str) -> str:
    return f"[{COLOURS.get(state, 'red')}]{state}[/]"
