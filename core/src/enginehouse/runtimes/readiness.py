"""Finds out if the engines of plugins can run, in this Python environment or in their own runtime."""

from __future__ import annotations

from enginehouse.plugin.loaded import Plugin, State
from enginehouse.plugin.manager import PluginManager
from enginehouse.plugin.records import Backend, Record
from enginehouse.runtimes.choosing import choose_runtime
from enginehouse.runtimes.errors import RuntimeProblem
from enginehouse.runtimes.variant import detect_variant


def runtime_instead(manager: PluginManager, record: Record) -> str | None:
    """Return the name of the runtime that an engine uses because this environment lacks its requirements.

    None if the engine needs no runtime, or if it has no usable runtime.
    """
    if not isinstance(record, Backend) or not record.runtimes or not manager.missing(record):
        return None
    try:
        return choose_runtime(record, "auto", detect_variant()).name
    except RuntimeProblem:
        return None


def plugin_state(manager: PluginManager, plugin: Plugin) -> State:
    """Return the state of a plugin. It is `"requirements missing"` if a record lacks requirements in this environment,
    and no runtime meets them. Core's own plugins may lack requirements, because their extras are optional."""
    if plugin.status != "ok" or plugin.internal:
        return plugin.status
    lacking = [
        record for record in plugin.records if manager.missing(record) and runtime_instead(manager, record) is None
    ]
    return "requirements missing" if lacking else "ok"


def plugin_states(manager: PluginManager) -> dict[str, State]:
    """Return the state of each plugin by name, or by `"distribution:name"` if two distributions share a name."""
    names = [plugin.name for plugin in manager.plugins]
    return {
        plugin.name if names.count(plugin.name) == 1 else f"{plugin.distribution}:{plugin.name}": plugin_state(
            manager, plugin
        )
        for plugin in manager.plugins
    }
