"""Loading plugins, finding what they declare, and telling them what happens.

Discovery is our own and not `pluggy.PluginManager.load_setuptools_entrypoints`, which one broken plugin aborts: here
each plugin is imported and registered by itself, and what goes wrong is kept as its own problem, shown by
`enginehouse plugins list` and wherever something of it is asked for.
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
"""Attribute of a plugin module: the contract version it is written for."""

OFFERED = ".".join(map(str, hookspecs.CONTRACT))
"""The contract version that is offered here."""

HEAVY = ("torch", "ray", "transformers")
"""Packages that no plugin's module may import: every command would wait for them."""

HEAVY_SECONDS = 1.0
"""Seconds of computing from which on importing a plugin's module is called heavy, whatever it imports."""

WRAPPABLE = "enginehouse_run_step"
"""The one hook a plugin may wrap."""


class PluginManager:
    """All plugins of a process and what they declare. Made by `load_plugins`.

    Attributes:
        plugins: every plugin, those of enginehouse itself first, then by name, whatever became of it.
        switches: what decided which were imported.
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

    # Lookup

    @overload
    def get(self, kind: type[R], name: str, *, elsewhere: bool = False) -> R: ...
    @overload
    def get(self, kind: str, name: str, *, elsewhere: bool = False) -> Any: ...
    def get(self, kind: type[Record] | str, name: str, *, elsewhere: bool = False) -> Any:
        """Return the record of a kind that `name`, or `"distribution:name"`, stands for, ready to be used.

        Args:
            kind: a record class, or its `kind`.
            name: as a user writes it.
            elsewhere: it may run in another Python environment (`enginehouse.runtimes`): what it requires is
                not looked for in this one.

        Raises:
            PluginLookupError: it cannot be used; `reason` says why, the message what to do.
        """
        word = _word(kind)
        found = self.providers(word, name)
        if not found:
            raise lookup.not_found_error(word, name, self.plugins, self._provided)
        if len(found) > 1:
            raise lookup.ambiguous_error(word, name, found)
        record, plugin = found[0]
        if not elsewhere and (missing := self.missing(record)):
            raise lookup.requirements_error(record, plugin, missing)
        return record

    @overload
    def all(self, kind: type[R]) -> list[R]: ...
    @overload
    def all(self, kind: str) -> list[Any]: ...
    def all(self, kind: type[Record] | str) -> list[Any]:
        """All records of a kind, usable or not, core's own first."""
        return [provided.record for provided in self.providers(kind)]

    def providers(self, kind: type[Record] | str | None = None, name: str | None = None) -> list[Provided]:
        """Records with who declared them, of a kind, of a name (or `"distribution:name"`), usable or not."""
        word = None if kind is None else _word(kind)
        distribution, plain = (None, None) if name is None else lookup.split_name(name)
        return [
            one
            for one in self._provided
            if (word is None or one.record.kind == word)
            and (plain is None or one.record.name == plain)
            and (distribution is None or is_same_distribution(distribution, one.plugin.distribution))
        ]

    def name_of(self, record: Record) -> str:
        """What a config calls a record: its name, or `"distribution:name"` where several distributions offer it."""
        found = self.providers(record.kind, record.name)
        owners = [plugin.distribution for one, plugin in found if one is record]
        return f"{owners[0]}:{record.name}" if len(found) > 1 and owners else record.name

    def function(self, kind: type[Function] | str, name: str) -> Callable[..., Any]:
        """Import the function a config names: a registered name, `"distribution:name"`, or `"module:function"`.

        Raises:
            PluginLookupError: no such name, or no such function.
            ResolveError: a plugin registered a function that is not there.
        """
        if self.is_name(name):
            return resolve(self.get(kind, name).function)
        try:
            return resolve(name)
        except ResolveError as error:
            raise PluginLookupError(f"{lookup.label(_word(kind))}: {error}", "unknown") from error

    def is_name(self, text: str) -> bool:
        """Whether `text` is to be looked up, `"name"` or `"distribution:name"`, and is not a `"module:attribute"`."""
        distribution, _ = lookup.split_name(text)
        return distribution is None or any(is_same_distribution(distribution, one.distribution) for one in self.plugins)

    # State

    def missing(self, record: Record) -> tuple[Missing, ...]:
        """Requirements of a backend, a tracker or a function that this Python environment does not meet. Nothing is
        imported to find out."""
        if not isinstance(record, Backend | Tracker | Function):
            return ()
        if id(record) not in self._missing:
            self._missing[id(record)] = tuple(find_missing(record.requires))
        return self._missing[id(record)]

    def environment(self) -> dict[str, str]:
        """Environment variables for worker processes, so that `plugins()` there loads the same plugins.

        What is broken here is kept out there: a plugin that hangs would hold each of them up.
        """
        broken = [plugin.name for plugin in self.plugins if plugin.status == "broken"]
        return replace(self.switches, blocked=(*self.switches.blocked, *broken)).environment()

    # Deciding and observing

    def pick_transport(self, train: TrainBackend, rollout: RolloutBackend, cluster: Placement) -> Transport:
        """Choose the weight transport of a run.

        Raises:
            PluginLookupError: a plugin named one that cannot be used.
            UserError: nothing installed reaches from one role to the other.
        """
        name = self._hooks.hook.enginehouse_pick_transport(
            train=train, rollout=rollout, cluster=cluster, transports=self.all(Transport)
        )
        return self.get(Transport, name)

    def run_step(self, run: Any, step: int) -> Mapping[str, float]:
        """Run one step: `run.run_step(step)`, unless a plugin answers in its stead, inside any plugin's wrappers."""
        hook = self._hooks.hook.enginehouse_run_step
        if len(hook.get_hookimpls()) == 1:  # core's own alone
            return run.run_step(step)
        return hook(run=run, step=step)

    def observes(self, event: str) -> bool:
        """Whether anybody observes `event` (`"step_finished"`); ask first where facts cost something to gather."""
        return self._observers.any(event)

    def observe(self, event: str, **facts: Any) -> None:
        """Tell each observer of `event` what happened, one by one. One that fails is logged and dropped.

        Args:
            event: a hook's name without `enginehouse_`: `"step_finished"`.
            facts: that hook's arguments, all of them.

        Raises:
            KeyError: no such event.
            PluginError: an observer failed and the switches are strict.
        """
        if self._observers.any(event):
            self._observers.observe(event, facts)

    def add_commands(self, cli: Any, of_enginehouse: bool = True) -> None:
        """Let each plugin add its sub-commands to a click group; one that fails is logged and adds nothing more.

        Args:
            cli: the group.
            of_enginehouse: also those of enginehouse itself.
        """
        left_out = {f"{one.distribution}:{one.name}" for one in self.plugins if one.internal and not of_enginehouse}
        with witness() as tell:
            for implementation in self._hooks.hook.enginehouse_commands.get_hookimpls():
                if implementation.plugin_name in left_out:
                    continue
                owner, _, name = implementation.plugin_name.rpartition(":")
                tell(name, owner)
                arguments = [cli for _ in implementation.argnames]
                if error := run_guarded(partial(implementation.function, *arguments)):
                    log.warning("plugin %s:%s could not add its commands: %s", owner, name, error, exc_info=error)

    # Loading

    def load(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        """Load the plugins of enginehouse itself, then all that are installed and not switched off."""
        for name in BUILTIN:
            plugin = Plugin(name.removesuffix(".plugin"), "enginehouse", __version__, name, internal=True)
            self.plugins.append(plugin)
            # core's own must load: a failure is a bug of this installation, not a plugin's state
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
        """Import and register one plugin; on failure take back all it declared and keep the error as its own."""
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
        """Check the contract, then register: declaring hooks are historic, so `module` declares inside this call."""
        said = OFFERED if plugin.internal else getattr(module, PROTOCOL, "")
        if not isinstance(said, str):  # as a number 1.10 is 1.1
            raise IncompatiblePlugin(f'{PROTOCOL} = {said!r} is no text; write {PROTOCOL} = "{said}"')
        plugin.protocol = said
        _check_protocol(plugin)
        self._loading = plugin
        name = f"{plugin.distribution}:{plugin.name}"
        try:
            _check_marked(module)
            self._hooks.register(module, name=name)
            self._check_hooks(module)
            plugin.hooks = sorted(caller.name for caller in self._hooks.get_hookcallers(module) or ())
        except BaseException:
            if self._hooks.has_plugin(name):
                self._hooks.unregister(module)
            self._provided = [one for one in self._provided if one.plugin is not plugin]
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
        """Refuse what pluggy would accept in silence: unknown hooks, and wrappers where none is called."""
        specified = [name for name in vars(hookspecs) if name.startswith(PREFIX)]
        for caller in self._hooks.get_hookcallers(module) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not module:
                    continue
                if not caller.has_spec() and not implementation.optionalhook:
                    raise PluginError(f"no hook {caller.name!r}; {nearest(caller.name, specified)}")
                if (implementation.wrapper or implementation.hookwrapper) and caller.name != WRAPPABLE:
                    raise PluginError(f"{caller.name} takes no wrapper; only {WRAPPABLE} does")


def load_plugins(
    enabled: Sequence[str] | None = None,
    blocked: Sequence[str] = (),
    strict: bool = False,
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> PluginManager:
    """Load plugins into a manager of its own. The environment's switches are not read here; see `plugins`.

    Args:
        enabled: only these, by plugin or distribution name; None: all that are installed; empty: enginehouse's own.
        blocked: not these.
        strict: an observer that fails raises.
        entry_points: stand in for what is installed.
    """
    return load_switched(Switches(None if enabled is None else tuple(enabled), tuple(blocked), strict), entry_points)


def load_switched(switches: Switches, entry_points: Iterable[metadata.EntryPoint] | None = None) -> PluginManager:
    """Load plugins as `switches` say."""
    manager = PluginManager(switches)
    manager.load(entry_points)
    return manager


def _word(kind: type[Record] | str) -> str:
    word = kind if isinstance(kind, str) else kind.kind
    words = [known.kind for known in KINDS]
    if word not in words:
        raise ValueError(f"no kind of record {word!r}; {nearest(word, words)}")
    return word


def _check_protocol(plugin: Plugin) -> None:
    """Check that a plugin's contract version runs here.

    Raises:
        IncompatiblePlugin: it does not, or the plugin says none.
    """
    said, owner = plugin.protocol, plugin.distribution
    if not said:
        raise IncompatiblePlugin(
            f"module {plugin.module} does not say which plugin contract it is written for; "
            f'add the line {PROTOCOL} = "{OFFERED}" to it, or ask the authors of {owner} to'
        )
    try:
        major, minor = (int(part) for part in said.split("."))
    except ValueError:
        raise IncompatiblePlugin(f"{PROTOCOL} = {said!r} is not of the form 'major.minor'") from None
    if major != hookspecs.CONTRACT[0] or minor > hookspecs.CONTRACT[1]:
        if (major, minor) > hookspecs.CONTRACT:
            cure = f"upgrade enginehouse to a version that offers {said}, or install an older {owner}"
        else:
            cure = f"upgrade {owner} to a version for {OFFERED}, or install an older enginehouse"
        raise IncompatiblePlugin(
            f"{plugin} is written for plugin contract {said}, and enginehouse {__version__} offers {OFFERED}; {cure}"
        )


def _heaviness(modules: Set[str], seconds: float) -> str:
    """What importing a plugin's module cost every command, where that is too much."""
    brought = [name for name in HEAVY if name in modules]
    if not brought and seconds < HEAVY_SECONDS:
        return ""
    what = f", and brings {', '.join(brought)}" if brought else ""
    return (
        f"importing its module takes {seconds:.1f} s of computing{what}: every command waits for that. "
        "Name engines and functions by strings, and import nothing heavy beside them"
    )


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is printed, also by C code and child processes, to stderr: stdout is for what was asked for."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undone:
        with contextlib.suppress(OSError):  # there may be no such descriptor
            kept = os.dup(1)
            undone.callback(os.close, kept)
            os.dup2(2, 1)
            undone.callback(os.dup2, kept, 1)
        yield


def _check_marked(module: ModuleType) -> None:
    """Refuse a function named like a hook that is not marked as one: pluggy would overlook it."""
    for name, value in getattr(module, "__dict__", {}).items():
        if name.startswith(PREFIX) and callable(value) and not hasattr(value, f"{hookspecs.PROJECT}_impl"):
            raise PluginError(f"{name} is not marked with @hookimpl")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PluginError | Overdue) else f"{type(error).__name__}: {text}".rstrip(": ")
