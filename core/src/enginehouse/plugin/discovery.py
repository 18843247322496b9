"""Which plugins are installed and which of them are wanted. Nothing is imported here: switches come first."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from enginehouse.plugin.builtin import STOREYS
from enginehouse.plugin.loaded import CORE, Plugin, canonical_name

GROUP = "enginehouse"
"""The entry-point group of plugins."""

ENABLED = "ENGINEHOUSE_PLUGINS"
"""Environment variable: unset, all plugins; empty, none; else only these, separated by commas."""

BLOCKED = "ENGINEHOUSE_BLOCK_PLUGINS"
"""Environment variable: not these, separated by commas."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Which plugins may be imported, by plugin or distribution name. Core's own are always loaded.

    Attributes:
        enabled: only these; None: all that are installed.
        blocked: not these.
        strict: an observer that fails ends the run.
    """

    enabled: tuple[str, ...] | None = None
    blocked: tuple[str, ...] = ()
    strict: bool = False

    def over(self, environment: Mapping[str, str]) -> Switches:
        """These switches with the environment's: its enabled plugins stand in for ours, blocked ones add up."""
        said = environment.get(ENABLED)
        enabled = self.enabled if said is None else _names(said)
        blocked = (*self.blocked, *_names(environment.get(BLOCKED, "")))
        return Switches(enabled, tuple(dict.fromkeys(blocked)), self.strict)

    def environment(self) -> dict[str, str]:
        """The environment variables that make another process load the same plugins."""
        variables = {} if self.enabled is None else {ENABLED: ",".join(self.enabled)}
        return {**variables, BLOCKED: ",".join(self.blocked)} if self.blocked else variables

    def refusal(self, plugin: Plugin) -> str:
        """Why `plugin` is not to be imported; empty if it may be."""
        if any(plugin.answers_to(name) for name in self.blocked):
            return f"blocked by name ({BLOCKED}, or plugins.blocked in the config)"
        if self.enabled is not None and not any(plugin.answers_to(name) for name in self.enabled):
            return f"not among the plugins that are enabled ({ENABLED}, or plugins.enabled in the config)"
        return ""


def read_switches() -> Switches:
    """The switches of this process's environment alone."""
    return Switches().over(os.environ)


def find_installed(
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> list[tuple[Plugin, metadata.EntryPoint]]:
    """Return all plugins but enginehouse's own, sorted by name, none imported.

    Args:
        entry_points: stand in for what is installed.
    """
    declared = find_entry_points() if entry_points is None else entry_points
    found = [(_plugin(entry_point), entry_point) for entry_point in declared if not _is_storey(entry_point)]
    return sorted(found, key=lambda pair: (pair[0].name, pair[0].distribution))


def find_storeys() -> list[tuple[Plugin, metadata.EntryPoint]]:
    """Return the plugins of enginehouse that stand on core, as far as they are installed: none imported."""
    own = sorted((one for one in find_entry_points() if _is_storey(one)), key=lambda one: one.name)
    return [
        (Plugin(one.module.removesuffix(".plugin"), CORE, one.dist.version, one.module, internal=True), one)
        for one in own
        if one.dist is not None
    ]


def _is_storey(entry_point: metadata.EntryPoint) -> bool:
    return entry_point.dist is not None and canonical_name(entry_point.dist.name) in STOREYS


def find_entry_points() -> Sequence[metadata.EntryPoint]:
    """Return the entry points of all installed plugins.

    The metadata of all distributions is read for that: once, unless a folder of the path has changed since.
    """
    return _entry_points(tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=1)
def _entry_points(path: tuple[tuple[str, int], ...]) -> Sequence[metadata.EntryPoint]:
    return tuple(metadata.entry_points(group=GROUP))


def _changed(folder: str) -> int:
    """Return when a folder's list of names last changed; 0 for none."""
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except (OSError, ValueError):
        return 0


def _plugin(entry_point: metadata.EntryPoint) -> Plugin:
    distribution = entry_point.dist
    return Plugin(
        name=entry_point.name,
        distribution=distribution.name if distribution else "unknown",
        version=distribution.version if distribution else "unknown",
        module=entry_point.value,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
