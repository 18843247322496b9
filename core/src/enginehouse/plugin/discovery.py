"""Discovery of installed plugins, and the switches that choose among them. Nothing is imported here."""

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
"""Environment variable with comma-separated names of the only plugins to load. Unset: all; empty: none."""

BLOCKED = "ENGINEHOUSE_BLOCK_PLUGINS"
"""Environment variable with comma-separated names of plugins not to load."""


@dataclass(frozen=True, slots=True)
class Switches:
    """The plugins that may be imported, by plugin or distribution name. Core's own plugins are always loaded.

    Attributes:
        enabled: the only plugins to load; None loads all installed plugins.
        blocked: plugins not to load.
        strict: True if a failing observer ends the run.
    """

    enabled: tuple[str, ...] | None = None
    blocked: tuple[str, ...] = ()
    strict: bool = False

    def merge(self, environment: Mapping[str, str]) -> Switches:
        """Return these switches merged with those of `environment`, a mapping of environment variables.

        The variable for enabled plugins replaces `enabled`; the variable for blocked plugins adds to `blocked`.
        """
        names = environment.get(ENABLED)
        enabled = self.enabled if names is None else _split_names(names)
        blocked = (*self.blocked, *_split_names(environment.get(BLOCKED, "")))
        return Switches(enabled, tuple(dict.fromkeys(blocked)), self.strict)

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which another process loads the same plugins."""
        variables = {} if self.enabled is None else {ENABLED: ",".join(self.enabled)}
        return {**variables, BLOCKED: ",".join(self.blocked)} if self.blocked else variables

    def refusal(self, plugin: Plugin) -> str:
        """Return the reason not to import `plugin`; empty if it may be imported."""
        if any(plugin.answers_to(name) for name in self.blocked):
            return f"blocked by name ({BLOCKED}, or plugins.blocked in the config)"
        if self.enabled is not None and not any(plugin.answers_to(name) for name in self.enabled):
            return f"not among the plugins that are enabled ({ENABLED}, or plugins.enabled in the config)"
        return ""


def read_switches() -> Switches:
    """Return the switches of this process's environment."""
    return Switches().merge(os.environ)


def find_installed(
    entry_points: Iterable[metadata.EntryPoint] | None = None,
) -> list[tuple[Plugin, metadata.EntryPoint]]:
    """Return all plugins except enginehouse's own, sorted by name, without importing them.

    Args:
        entry_points: replacement for the installed entry points.
    """
    declared = find_entry_points() if entry_points is None else entry_points
    pairs = [(_plugin(entry_point), entry_point) for entry_point in declared if not _is_storey(entry_point)]
    return sorted(pairs, key=lambda pair: (pair[0].name, pair[0].distribution))


def find_storeys() -> list[tuple[Plugin, metadata.EntryPoint]]:
    """Return the installed plugins of enginehouse that are built on core. They are not imported."""
    return [
        (Plugin(point.module.removesuffix(".plugin"), CORE, point.dist.version, point.module, internal=True), point)
        for point in sorted(filter(_is_storey, find_entry_points()), key=lambda point: point.name)
        if point.dist is not None
    ]


def _is_storey(entry_point: metadata.EntryPoint) -> bool:
    return entry_point.dist is not None and canonical_name(entry_point.dist.name) in STOREYS


def find_entry_points() -> Sequence[metadata.EntryPoint]:
    """Return the entry points of all installed plugins. The metadata of all distributions are read once, and again
    after a folder of `sys.path` has changed."""
    return _entry_points(tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=1)
def _entry_points(path: tuple[tuple[str, int], ...]) -> Sequence[metadata.EntryPoint]:
    return tuple(metadata.entry_points(group=GROUP))


def _changed(folder: str) -> int:
    """Return the time in ns at which the files of a folder last changed; 0 if there is no such folder."""
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


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
