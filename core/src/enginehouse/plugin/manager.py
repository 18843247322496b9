"""Loads plugins, finds their declarations, and calls their hooks.

Discovery does not use `pluggy.PluginManager.load_setuptools_entrypoints`, because one broken plugin aborts it. Here
each plugin is imported and registered separately. If that fails, the error is stored as the plugin's problem.
`enginehouse plugins list` and every request for the plugin show the problem.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pluggy

from enginehouse import __version__
from enginehouse.errors import nearest
from enginehouse.plugin import hookspecs, lookup
from enginehouse.plugin.builtin import BUILTIN
from enginehouse.plugin.declarations import DECLARING, check_record
from enginehouse.plugin.deprecation import gather_deprecations, warn_of_fields
from enginehouse.plugin.discovery import BLOCKED, Switches, find_installed, find_storeys
from enginehouse.plugin.errors import IncompatiblePlugin, PluginError, PluginLookupError
from enginehouse.plugin.guard import Overdue, run_guarded, witness
from enginehouse.plugin.loaded import Plugin, Provided, is_same_distribution
from enginehouse.plugin.observers import PREFIX, Observers
from enginehouse.plugin.records import (
    KINDS,
    Backend,
    Function,
    Record,
    ResolveError,
    RolloutBackend,
    Tracker,
    TrainBackend,
    Transport,
    resolve,
)  # fmt: skip
from enginehouse.plugin.requirements import Missing, find_missing

if TYPE_CHECKING:
    from enginehouse.plugin.placement import Placement

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Record)

PROTOCOL = "enginehouse_protocol"
"""Attribute of a plugin module: the contract version for which it is written."""

OFFERED = ".".join(map(str, hookspecs.CONTRACT))
"""The contract version of this enginehouse."""

HEAVY = ("torch", "ray", "transformers")
"""Packages that a plugin's module must not import, because every command would wait for them."""

HEAVY_SECONDS = 1.0
"""Number of CPU seconds from which the import of a plugin's module counts as heavy."""

WRAPPABLE = "enginehouse_run_step"
"""The only hook that a plugin may wrap."""


class PluginManager:
    """All plugins of a process and their declarations. `load_plugins` creates a manager.

    Attributes:
        plugins: every plugin, loaded or not: enginehouse's own first, then sorted by name.
        switches: the switches that decided which plugins were imported.
    """

    def __init__(self, switches: Switches = Switches()):  # noqa: B008 - frozen
        self.plugins: list[Plugin] = []
        self.switches = switches
        self._provided: list[Provided] = []
        self._missing: dict[int, tuple[Missing, ...]] = {}
        self._loading: Plugin | None = None
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)
        for hook in DECLARING:
            getattr(self._hooks.hook, hook).call_historic(kwargs={"register": self._register_of(hook)})
        self._observers = Observers(self._hooks, switches.strict)

    @overload
    def get(self, kind: type[R], name: str, *, elsewhere: bool = False) -> R: ...
    @overload
    def get(self, kind: str, name: str, *, elsewhere: bool = False) -> Any: ...
    def get(self, kind: type[Record] | str, name: str, *, elsewhere: bool = False) -> Any:
        """Return the usable record of a kind that has this name.

        Args:
            kind: a record class, or its `kind`.
            name: the name in a config, or `"distribution:name"`.
            elsewhere: True if the record may run in another Python environment (`enginehouse.runtimes`). Its
                requirements are then not checked in this environment.

        Raises:
            PluginLookupError: if the name cannot be used. `reason` is the cause, and the message names a remedy.
        """
        word = _word(kind)
        providers = self.providers(word, name)
        if not providers:
            raise lookup.not_found_error(word, name, self.plugins, self._provided)
        if len(providers) > 1:
            raise lookup.ambiguous_error(word, name, providers)
        record, plugin = providers[0]
        if not elsewhere and (missing := self.missing(record)):
            raise lookup.requirements_error(record, plugin, missing)
        return record

    @overload
    def all(self, kind: type[R]) -> list[R]: ...
    @overload
    def all(self, kind: str) -> list[Any]: ...
    def all(self, kind: type[Record] | str) -> list[Any]:
        """Return all records of a kind, usable or not, core's own first."""
        return [provided.record for provided in self.providers(kind)]

    def providers(self, kind: type[Record] | str | None = None, name: str | None = None) -> list[Provided]:
        """Return records with their plugins, usable or not.

        Args:
            kind: return only records of this kind.
            name: return only records with this name, or `"distribution:name"`.
        """
        word = None if kind is None else _word(kind)
        distribution, plain = (None, None) if name is None else lookup.split_name(name)
        return [
            provided
            for provided in self._provided
            if (word is None or provided.record.kind == word)
            and (plain is None or provided.record.name == plain)
            and (distribution is None or is_same_distribution(distribution, provided.plugin.distribution))
        ]

    def name_of(self, record: Record) -> str:
        """Return the name of a record in a config: `"distribution:name"` if several distributions declare the name."""
        providers = self.providers(record.kind, record.name)
        owners = [plugin.distribution for declared, plugin in providers if declared is record]
        return f"{owners[0]}:{record.name}" if len(providers) > 1 and owners else record.name

    def function(self, kind: type[Function] | str, name: str) -> Callable[..., Any]:
        """Import the function that a config names: a registered name, `"distribution:name"`, or `"module:function"`.

        Raises:
            PluginLookupError: if there is no such name or no such function.
            ResolveError: if a plugin registered a function that does not exist.
        """
        if self.is_name(name):
            return resolve(self.get(kind, name).function)
        try:
            return resolve(name)
        except ResolveError as error:
            raise PluginLookupError(f"{lookup.label(_word(kind))}: {error}", "unknown") from error

    def is_name(self, text: str) -> bool:
        """Return True if `text` is a name to look up, and not a `"module:attribute"` string."""
        name, _ = lookup.split_name(text)
        return name is None or any(is_same_distribution(name, plugin.distribution) for plugin in self.plugins)

    def missing(self, record: Record) -> tuple[Missing, ...]:
        """Return the requirements of a record that this Python environment does not meet. The check imports nothing."""
        if not isinstance(record, Backend | Tracker | Function):
            return ()
        if id(record) not in self._missing:
            self._missing[id(record)] = tuple(find_missing(record.requires))
        return self._missing[id(record)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which `plugins()` in a worker process loads the same plugins. They
        block plugins that are broken in this process, because each worker would wait for a plugin that hangs."""
        broken = [plugin.name for plugin in self.plugins if plugin.status == "broken"]
        return replace(self.switches, blocked=(*self.switches.blocked, *broken)).environment()

    def pick_transport(self, train: TrainBackend, rollout: RolloutBackend, cluster: Placement) -> Transport:
        """Choose the weight transport of a run.

        Raises:
            PluginLookupError: if a plugin named a transport that cannot be used.
            UserError: if no installed transport connects the two roles.
        """
        name = self._hooks.hook.enginehouse_pick_transport(
            train=train, rollout=rollout, cluster=cluster, transports=self.all(Transport)
        )
        return self.get(Transport, name)

    def run_step(self, run: Any, step: int) -> Mapping[str, float]:
        """Run one step with `run.run_step(step)`, or a plugin's replacement, inside the wrappers of plugins."""
        hook = self._hooks.hook.enginehouse_run_step
        if len(hook.get_hookimpls()) == 1:  # only core's own
            return run.run_step(step)
        return hook(run=run, step=step)

    def observes(self, event: str) -> bool:
        """Return True if a plugin observes `event`, such as `"step_finished"`. Call this before you compute expensive
        arguments of `observe`."""
        return self._observers.any(event)

    def observe(self, event: str, **facts: Any) -> None:
        """Call each observer of `event`, one after another. An observer that fails is logged and dropped.

        Args:
            event: name of a hook without `enginehouse_`, such as `"step_finished"`.
            facts: arguments of the hook.

        Raises:
            KeyError: if there is no such event.
            PluginError: if an observer failed and the switches are strict.
        """
        if self._observers.any(event):
            self._observers.observe(event, facts)

    def add_commands(self, cli: Any, of_enginehouse: bool = True) -> None:
        """Let each plugin add its sub-commands to a click group. If a plugin fails, its error is logged, and the next
        plugin follows.

        Args:
            of_enginehouse: True to include enginehouse's own plugins.
        """
        skipped = () if of_enginehouse else [_hook_name(plugin) for plugin in self.plugins if plugin.internal]
        with witness() as tell:
            for implementation in self._hooks.hook.enginehouse_commands.get_hookimpls():
                if implementation.plugin_name in skipped:
                    continue
                owner, _, name = implementation.plugin_name.rpartition(":")
                tell(name, owner)
                arguments = [cli for _ in implementation.argnames]
                if error := run_guarded(partial(implementation.function, *arguments)):
                    log.warning("plugin %s:%s could not add its commands: %s", owner, name, error, exc_info=error)

    def load(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        """Load the plugins of enginehouse itself, then all installed plugins that are not switched off."""
        for name in BUILTIN:
            plugin = Plugin(name.removesuffix(".plugin"), "enginehouse", __version__, name, internal=True)
            self.plugins.append(plugin)
            # Errors are raised here, because they are bugs of this installation.
            self._register(plugin, importlib.import_module(name))
        with witness() as tell:
            for plugin, entry_point in (*find_storeys(), *find_installed(entry_points)):
                self.plugins.append(plugin)
                refusal = "" if plugin.internal else self.switches.refusal(plugin)
                if refusal:
                    plugin.status, plugin.problem = "blocked", refusal
                else:
                    if not plugin.internal:
                        tell(plugin.name, str(plugin))
                    self.load_one(plugin, entry_point)
        self._observers = Observers(self._hooks, self.switches.strict)

    def load_one(self, plugin: Plugin, entry_point: metadata.EntryPoint) -> None:
        """Import and register one plugin. If that fails, withdraw its declarations and store the error in `plugin`."""
        before, seconds = set(sys.modules), time.thread_time()
        with gather_deprecations() as plugin.deprecated, stdout_to_stderr():
            error = run_guarded(lambda: self._register(plugin, entry_point.load()))
        if error is None:
            heavy = _heaviness(sys.modules.keys() - before, time.thread_time() - seconds)
            plugin.note = "; ".join(filter(None, [*plugin.deprecated, heavy]))
        elif isinstance(error, IncompatiblePlugin):
            plugin.status, plugin.problem = "incompatible", str(error)
        else:
            plugin.status = "broken"
            plugin.problem = _one_line(error)
            if isinstance(error, Overdue):
                plugin.problem += f"; {BLOCKED}={plugin.name} keeps it out, as does uninstalling {plugin.distribution}"
            plugin.traceback = "".join(traceback.format_exception(error))
        if plugin.status != "ok":
            log.info("plugin %s (%s) is %s: %s", plugin.name, plugin, plugin.status, plugin.problem)

    def _register(self, plugin: Plugin, module: ModuleType) -> None:
        """Check the contract, then register `module`. Its historic declaring hooks run inside this call."""
        protocol = OFFERED if plugin.internal else getattr(module, PROTOCOL, "")
        if not isinstance(protocol, str):  # a number would turn 1.10 into 1.1
            raise IncompatiblePlugin(f'{PROTOCOL} must be a text, not {protocol!r}; write {PROTOCOL} = "{protocol}"')
        plugin.protocol = protocol
        _check_protocol(plugin)
        self._loading = plugin
        name = _hook_name(plugin)
        try:
            _check_marked(module)
            self._hooks.register(module, name=name)
            self._check_hooks(module)
            plugin.hooks = sorted(caller.name for caller in self._hooks.get_hookcallers(module) or ())
        except BaseException:
            if self._hooks.has_plugin(name):
                self._hooks.unregister(module)
            self._provided = [provided for provided in self._provided if provided.plugin is not plugin]
            plugin.withdrawn = [(record.kind, record.name) for record in plugin.records]
            plugin.records.clear()
            plugin.hooks.clear()
            raise
        finally:
            self._loading = None

    def _register_of(self, hook: str) -> Callable[[Record], None]:
        def register(record: Record) -> None:
            plugin = self._loading
            if plugin is None:
                raise PluginError(
                    f"{hook}: register(...) was called after the plugin was loaded; call it inside the hook"
                )
            check_record(record, hook)
            warn_of_fields(record)
            what = f"{lookup.label(record.kind)} {record.name!r}"
            for _, owner in self.providers(record.kind, record.name):
                if owner is plugin:
                    raise PluginError(f"{what} is declared twice")
                if owner.internal:
                    raise PluginError(f"{what} is a name of enginehouse itself; choose another")
            plugin.records.append(record)
            self._provided.append(Provided(record, plugin))

        return register

    def _check_hooks(self, module: ModuleType) -> None:
        """Reject mistakes that pluggy ignores: unknown hooks, and wrappers of hooks that cannot be wrapped."""
        specified = [name for name in vars(hookspecs) if name.startswith(PREFIX)]
        for caller in self._hooks.get_hookcallers(module) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not module:
                    continue
                if not caller.has_spec() and not implementation.optionalhook:
                    raise PluginError(f"unknown hook {caller.name!r}. {nearest(caller.name, specified)}")
                if (implementation.wrapper or implementation.hookwrapper) and caller.name != WRAPPABLE:
                    raise PluginError(f"{caller.name} cannot be wrapped; only {WRAPPABLE} can")


def load_plugins(
    enabled: Sequence[str] | None = None,
    blocked: Sequence[str] = (),
    strict: bool = False,
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> PluginManager:
    """Load plugins into a new manager. `plugins()` also applies the switches of the environment, but this function does
    not.

    Args:
        enabled: the only plugins to load, by plugin or distribution name. None loads all installed plugins; empty loads
            only enginehouse's own.
        blocked: plugins not to load.
        strict: True if a failing observer raises.
        entry_points: replacement for the installed entry points.
    """
    return load_switched(Switches(None if enabled is None else tuple(enabled), tuple(blocked), strict), entry_points)


def load_switched(switches: Switches, entry_points: Iterable[metadata.EntryPoint] | None = None) -> PluginManager:
    manager = PluginManager(switches)
    manager.load(entry_points)
    return manager


def _word(kind: type[Record] | str) -> str:
    word = kind if isinstance(kind, str) else kind.kind
    words = [known.kind for known in KINDS]
    if word not in words:
        raise ValueError(f"unknown kind of record {word!r}. {nearest(word, words)}")
    return word


def _check_protocol(plugin: Plugin) -> None:
    """Raise an `IncompatiblePlugin` if a plugin states no contract version, or an incompatible one."""
    protocol, owner = plugin.protocol, plugin.distribution
    if not protocol:
        raise IncompatiblePlugin(
            f"module {plugin.module} does not say which plugin contract it is written for; "
            f'add the line {PROTOCOL} = "{OFFERED}" to it, or ask the authors of {owner} to add this line'
        )
    try:
        major, minor = (int(part) for part in protocol.split("."))
    except ValueError:
        raise IncompatiblePlugin(f"{PROTOCOL} = {protocol!r} is not of the form 'major.minor'") from None
    if major != hookspecs.CONTRACT[0] or minor > hookspecs.CONTRACT[1]:
        if (major, minor) > hookspecs.CONTRACT:
            cure = f"upgrade enginehouse to a version that offers {protocol}, or install an older {owner}"
        else:
            cure = f"upgrade {owner} to a version for {OFFERED}, or install an older enginehouse"
        raise IncompatiblePlugin(
            f"{plugin} is written for plugin contract {protocol}, but enginehouse {__version__} offers {OFFERED}; "
            f"{cure}"
        )


def _heaviness(modules: Set[str], seconds: float) -> str:
    """Describe the cost of importing a plugin's module if the cost is too high; else return an empty text."""
    heavy = [name for name in HEAVY if name in modules]
    if not heavy and seconds < HEAVY_SECONDS:
        return ""
    what = f", and imports {', '.join(heavy)}" if heavy else ""
    return (
        f"importing its module takes {seconds:.1f} s of CPU time{what}: every command waits for that. "
        "Name engines and functions by strings, and import no heavy package in this module"
    )


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect all output in the block to stderr, also of C code and child processes. Stdout is only for results."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as cleanup:
        with contextlib.suppress(OSError):  # the descriptor may be closed
            former = os.dup(1)
            cleanup.callback(os.close, former)
            os.dup2(2, 1)
            cleanup.callback(os.dup2, former, 1)
        yield


def _check_marked(module: ModuleType) -> None:
    """Reject a function that has the name of a hook but is not marked with `@hookimpl`. Pluggy would ignore it."""
    for name, value in getattr(module, "__dict__", {}).items():
        if name.startswith(PREFIX) and callable(value) and not hasattr(value, f"{hookspecs.PROJECT}_impl"):
            raise PluginError(f"{name} is not marked with @hookimpl")


def _hook_name(plugin: Plugin) -> str:
    return f"{plugin.distribution}:{plugin.name}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError | Overdue) else f"{type(error).__name__}: {text}".rstrip(": ")
