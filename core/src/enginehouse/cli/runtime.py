"""`enginehouse runtime create|list|remove|doctor`: Python environments for engines."""

from __future__ import annotations

import sys
import time

import click

from enginehouse.cli.console import colour_state, escape, make_table, terminal
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
    RuntimeRecipe,
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


@click.group()
def runtime() -> None:
    """Create and check Python environments for engines.

    A runtime is a separate Python environment for an engine that cannot be installed beside the other engines.
    """


@runtime.command("create")
@click.argument("backend", metavar="ENGINE")
@click.option(
    "--variant", help="Requirement set of the engine, such as cpu or cuda; unset: the set that fits this machine."
)
@click.option("--name", help="Name of the runtime; unset: a name made of engine, variant and a hash.")
def create(backend: str, variant: str | None, name: str | None) -> None:
    """Create the runtime of ENGINE, unless it exists.

    Runtimes are folders in ~/.cache/enginehouse/runtimes, or in ENGINEHOUSE_RUNTIMES. A runtime takes several GiB of
    disk, and its creation takes several minutes. The output of pip is in the subfolder .logs.
    """
    from enginehouse.cli.interrupts import EXIT_CODE, Interrupts
    from enginehouse.runtimes.plugin_install import install_plugin

    manager = loaded_plugins()
    record = _record(manager, backend)
    if record is None:
        providers = [provided for provided in manager.providers("rollout") if getattr(provided.record, "runtimes", ())]
        error = not_found_error("rollout", backend, manager.plugins, providers)
        if error.reason != "not installed":
            raise _without_runtime(manager, backend, error)
        click.echo(install_plugin(backend))
        manager = reload_plugins()
        record = _record(manager, backend)
        if record is None:
            raise RuntimeProblem(
                f"the plugin of {backend!r} was installed, but it declares no runtime: see `plugins list`"
            )
    recipe = make_recipe(record, variant or detect_variant())
    if name is not None and (name.startswith(".") or "/" in name):
        raise RuntimeProblem(
            f"{name!r} cannot be the name of a runtime: the name of its folder in {runtimes_folder()} must not begin "
            "with '.' or contain '/'"
        )
    if name in ("auto", CURRENT, OWN):
        raise RuntimeProblem(
            f"{name!r} cannot be the name of a runtime: in a config, engine.runtime={name} has another meaning"
        )
    existing = next((runtime for runtime in list_runtimes() if runtime.name == (name or recipe.name)), None)
    if existing is not None and find_state(existing, record).word == "ok":
        click.echo(f"runtime {existing.name} exists already: {_versions(existing)}. {_when_used(record)}")
        return
    try:
        with Interrupts(lambda: None):
            made = _make_with_progress(recipe, name)
    except KeyboardInterrupt:
        click.echo("Interrupted. The incomplete runtime was deleted; the same command starts again.", err=True)
        sys.exit(EXIT_CODE)
    click.echo(f"made runtime {made.name}: {_versions(made)}. {_when_used(record)}")


@runtime.command("list")
def list_() -> None:
    """List the runtimes with their engines and states."""
    runtimes = list_runtimes()
    if not runtimes:
        click.echo(f"there is no runtime in {runtimes_folder()}; to create one: `enginehouse runtime create ENGINE`")
        return
    manager = loaded_plugins()
    table = make_table("name", "engine", "variant", "version", "size", "state")
    for runtime in runtimes:
        manifest = runtime.manifest
        facts = (manifest.backend, manifest.variant, manifest.versions.get("engine", "")) if manifest else ("", "", "")
        state = find_state(runtime, _record(manager, facts[0]))
        table.add_row(runtime.name, *facts, f"{runtime.size() / 2**30:.2f} GiB", colour_state(state.word))
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
    """Check the runtime NAME, or all runtimes.

    In each runtime, the command runs the imports of a worker. The exit code is 1 if a runtime cannot be used.
    """
    manager = loaded_plugins()
    table = make_table("name", "state", "problem", "cure")
    runtimes = [find_runtime(name)] if name else list_runtimes()
    states = [_examine(runtime, manager) for runtime in runtimes]
    for runtime, state in zip(runtimes, states, strict=True):
        table.add_row(runtime.name, colour_state(state.word), escape(state.problem), escape(state.cure))
    if states:
        terminal().print(table)
    else:
        click.echo(f"there is no runtime in {runtimes_folder()}")
    if any(state.word not in ("ok", "being made") for state in states):
        sys.exit(1)


def _examine(runtime: Runtime, manager: PluginManager) -> RuntimeState:
    """Return the state of a runtime. If the state is ok, start its interpreter, and run the imports of a worker."""
    from enginehouse.runtimes.probe import check_interpreter, check_worker

    manifest = runtime.manifest
    record = _record(manager, manifest.backend if manifest else "")
    state = find_state(runtime, record)
    if state.word != "ok":
        return state
    assert record is not None
    assert manifest is not None
    try:
        check_interpreter(str(runtime.python))
        check_worker(str(runtime.python), make_recipe(record, manifest.variant))
    except RuntimeProblem as error:
        return RuntimeState("broken", str(error), remake_command(runtime, manifest))
    return state


def _record(manager: PluginManager, backend: str) -> Backend | None:
    """Return the record of the engine with this name; None if no engine with this name declares runtimes. If a rollout
    engine and a training engine do, return the record of the rollout engine."""
    for kind in ("rollout", "train"):
        for provided in manager.providers(kind, backend) if backend else ():
            if isinstance(provided.record, Backend) and provided.record.runtimes:
                return provided.record
    return None


def _without_runtime(manager: PluginManager, backend: str, error: UserError) -> UserError:
    if manager.providers("rollout", backend) or manager.providers("train", backend):
        return RuntimeProblem(
            f"engine {backend!r} needs no runtime: it runs in this Python environment. If a package is missing, "
            f"`enginehouse plugins show {backend}` names it"
        )
    message, *traceback = str(error).split("\n    Traceback ")
    return RuntimeProblem(f"{message}. See enginehouse plugins doctor") if traceback else error


def _make_with_progress(recipe: RuntimeRecipe, name: str | None) -> Runtime:
    """Make a runtime. Print each step and its duration; on a terminal, also show pip's output and the elapsed time."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    step, since = "", 0.0
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("")

        def show(new_step: str, line: str) -> None:
            nonlocal step, since
            if new_step != step:
                end_step()
                screen.print(escape(new_step))
                step, since = new_step, time.monotonic()
                progress.reset(task)
            text = f"{new_step}: {line.strip()}" if line else new_step
            progress.update(task, description=text[: max(screen.width - 16, 20)])

        def end_step() -> None:
            if step:
                screen.print(f"  {time.monotonic() - since:.0f} s")

        made = make_runtime(recipe, name, show)
        end_step()
        return made


def _when_used(record: Backend) -> str:
    """Return a sentence that says when a config uses the runtime of this engine."""
    if any(find_missing(record.requires)):
        return f"It is used wherever a config asks for {record.name!r}"
    return (
        f"This Python environment also meets the requirements of {record.name!r}, and is used by default. To use the "
        "runtime, set engine.runtime=own in the config"
    )


def _versions(runtime: Runtime) -> str:
    manifest = runtime.manifest
    assert manifest is not None
    versions = {manifest.module if name == "engine" else name: version for name, version in manifest.versions.items()}
    return ", ".join(f"{name} {version}" for name, version in versions.items())
