"""`enginehouse runtime create|list|remove|doctor`: the Python environments that engines of their own kind run in."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from enginehouse.cli.console import escape, terminal
from enginehouse.errors import UserError
from enginehouse.plugin import Backend, PluginManager, reload_plugins
from enginehouse.plugin import plugins as loaded_plugins
from enginehouse.plugin.lookup import not_found_error
from enginehouse.plugin.requirements import find_missing
from enginehouse.runtimes import (
    CURRENT,
    OWN,
    Runtime,
    RuntimeProblem,
    RuntimeState,
    detect_variant,
    find_runtime,
    find_state,
    list_runtimes,
    make_recipe,
    make_runtime,
    remake_command,
    remove_runtime,
    runtimes_folder,
)  # fmt: skip

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {"ok": "green", "stale": "yellow", "being made": "yellow"}


@click.group()
def runtime() -> None:
    """Make and check Python environments for engines.

    An engine that cannot be installed beside the others runs in an environment of its own, a runtime; the other roles
    of a run stay where they are.
    """


@runtime.command("create")
@click.argument("backend")
@click.option("--variant", help="Which of the backend's requirement sets; unset: what this machine has (cpu or cuda).")
@click.option("--name", help="What to call it; unset: after backend, variant and content.")
def create(backend: str, variant: str | None, name: str | None) -> None:
    """Make the runtime of BACKEND, unless it is there.

    Runtimes are folders in ~/.cache/enginehouse/runtimes, or in ENGINEHOUSE_RUNTIMES; one takes some gigabytes and
    minutes. What pip says meanwhile is in .logs there.
    """
    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse.runtimes.plugin_install import install_plugin

    manager = loaded_plugins()
    record = _record(manager, backend)
    if record is None:
        known = [one for one in manager.providers("rollout") if isinstance(one.record, Backend) and one.record.runtimes]
        error = not_found_error("rollout", backend, manager.plugins, known)
        if error.reason != "not installed":
            raise _without_runtime(manager, backend, error)
        click.echo(install_plugin(backend))
        manager = reload_plugins()
        record = _record(manager, backend)
        if record is None:
            raise RuntimeProblem(
                f"the plugin of {backend!r} was installed, but it declares no runtime: see `plugins list`"
            )
    wanted = make_recipe(record, variant or detect_variant())
    if name is not None and (name.startswith(".") or "/" in name):
        raise RuntimeProblem(f"{name!r} cannot be the name of a runtime: it becomes a folder in {runtimes_folder()}")
    if name in ("auto", CURRENT, OWN):
        raise RuntimeProblem(
            f"{name!r} cannot be the name of a runtime: a config's engine.runtime={name} means something else"
        )
    there = next((one for one in list_runtimes() if one.name == (name or wanted.name)), None)
    if there is not None and find_state(there, record).word == "ok":
        click.echo(f"runtime {there.name} is there already: {_versions(there)}. {_when_used(record)}")
        return
    try:
        with Interrupts(lambda: None):
            made = _made_with_progress(wanted, name)
    except KeyboardInterrupt:
        click.echo("Interrupted. Nothing half-made is left; the same command begins anew.", err=True)
        sys.exit(EXIT_CODE)
    click.echo(f"made runtime {made.name}: {_versions(made)}. {_when_used(record)}")


@runtime.command("list")
def list_() -> None:
    """List runtimes, their engines and states."""
    there = list_runtimes()
    if not there:
        click.echo(f"there is no runtime in {runtimes_folder()}; `enginehouse runtime create BACKEND` makes one")
        return
    manager = loaded_plugins()
    table = _table("name", "backend", "variant", "engine", "size", "state")
    for one in there:
        state = find_state(one, _record(manager, one.manifest.backend if one.manifest else ""))
        backend, variant = (one.manifest.backend, one.manifest.variant) if one.manifest else ("", "")
        engine = one.manifest.versions.get("engine", "") if one.manifest else ""
        table.add_row(one.name, backend, variant, engine, f"{one.size() / 2**30:.2f} GiB", _coloured(state))
    terminal().print(table)


@runtime.command("remove")
@click.argument("name")
def remove(name: str) -> None:
    """Delete the runtime NAME."""
    remove_runtime(find_runtime(name))
    click.echo(f"removed runtime {name}")


@runtime.command("doctor")
@click.argument("name", required=False)
def doctor(name: str | None) -> None:
    """Check the runtime NAME, or all of them, by starting what a worker starts; exit code 1 if something is wrong."""
    there = [find_runtime(name)] if name else list_runtimes()
    manager = loaded_plugins()
    table = _table("name", "state", "problem", "cure")
    states = [(one, _examined(one, manager)) for one in there]
    for one, state in states:
        table.add_row(one.name, _coloured(state), escape(state.problem), escape(state.cure))
    if states:
        terminal().print(table)
    else:
        click.echo(f"there is no runtime in {runtimes_folder()}")
    if any(state.word not in ("ok", "being made") for _, state in states):
        sys.exit(1)


def _examined(one: Runtime, manager: PluginManager) -> RuntimeState:
    """The state of a runtime, its interpreter asked as well."""
    from enginehouse.runtimes.probe import check_interpreter, check_worker

    record = _record(manager, one.manifest.backend if one.manifest else "")
    state = find_state(one, record)
    if state.word != "ok":
        return state
    assert record is not None
    assert one.manifest is not None
    try:
        check_interpreter(str(one.python))
        check_worker(str(one.python), make_recipe(record, one.manifest.variant))
    except RuntimeProblem as error:
        return RuntimeState("broken", str(error), remake_command(one, one.manifest))
    return state


def _record(manager: PluginManager, backend: str) -> Backend | None:
    """The backend of a name that a runtime can be made of, the rollout backend first."""
    for kind in ("rollout", "train"):
        for provided in manager.providers(kind, backend) if backend else ():
            if isinstance(provided.record, Backend) and provided.record.runtimes:
                return provided.record
    return None


def _without_runtime(manager: PluginManager, backend: str, error: UserError) -> UserError:
    if manager.providers("rollout", backend) or manager.providers("train", backend):
        return RuntimeProblem(f"backend {backend!r} has no runtime: it runs in this environment, or not at all yet")
    said, *traceback = str(error).split("\n    Traceback ")
    return RuntimeProblem(f"{said}. See enginehouse plugins doctor") if traceback else error


def _made_with_progress(wanted: object, name: str | None) -> Runtime:
    """Make it, saying each step and its seconds; on a terminal also what the step says, and for how long it runs."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    step, since = "", 0.0
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("")

        def told(doing: str, line: str) -> None:
            nonlocal step, since
            if doing != step:
                ended()
                screen.print(escape(doing))
                step, since = doing, time.monotonic()
                progress.reset(task)
            said = f"{doing}: {line.strip()}" if line else doing
            progress.update(task, description=said[: max(screen.width - 16, 20)])

        def ended() -> None:
            if step:
                screen.print(f"  {time.monotonic() - since:.0f} s")

        made = make_runtime(wanted, name, told)  # type: ignore[arg-type]
        ended()
        return made


def _when_used(record: Backend) -> str:
    """Whether a config gets the backend's runtime without asking for it."""
    if next(iter(find_missing(record.requires)), None) is not None:
        return f"It is used wherever a config asks for {record.name!r}"
    return (
        f"All that {record.name!r} needs is installed in this environment too, which is taken first: a config asks for "
        "the runtime by engine.runtime=own"
    )


def _versions(one: Runtime) -> str:
    manifest = one.manifest
    assert manifest is not None
    named = {manifest.module if name == "engine" else name: version for name, version in manifest.versions.items()}
    return ", ".join(f"{name} {version}" for name, version in named.items())


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _coloured(state: RuntimeState) -> str:
    return f"[{COLOURS.get(state.word, 'red')}]{state.word}[/]"
