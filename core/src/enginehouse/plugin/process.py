"""The plugins of this process: loaded once, at first use, by the switches of its environment and of the config."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from enginehouse.plugin.discovery import Switches, read_switches
from enginehouse.plugin.manager import PluginManager, load_switched

log = logging.getLogger(__name__)

_current: PluginManager | None = None
_lock = threading.RLock()


def plugins() -> PluginManager:
    """This process's plugins, loaded at first use by the switches in its environment."""
    global _current
    with _lock:
        if _current is None:
            _current = load_switched(read_switches())
        return _current


def reload_plugins() -> PluginManager:
    """Load this process's plugins anew, by the same switches: after one was installed."""
    global _current
    with _lock:
        switches = read_switches() if _current is None else _current.switches
        _current = load_switched(switches)
        return _current


def configure_plugins(
    enabled: Sequence[str] | None = None, blocked: Sequence[str] = (), strict: bool = False
) -> PluginManager:
    """Make the config's switches, joined with the environment's, those of this process, and return its plugins.

    Where the environment names the plugins to enable, that stands in for `enabled`; blocked ones add up. Called on
    the controller before anything of a plugin is used; it warns of plugins that could not be loaded, and of what they
    use that will go. Worker processes get the same plugins through `PluginManager.environment`.
    """
    global _current
    switches = Switches(None if enabled is None else tuple(enabled), tuple(blocked), strict).over(os.environ)
    with _lock:
        if _current is None or _current.switches != switches:
            _current = load_switched(switches)
        manager = _current
    for plugin in manager.plugins:
        if plugin.status in ("broken", "incompatible"):
            log.warning("plugin %s (%s) is %s: %s", plugin.name, plugin, plugin.status, plugin.problem)
        for said in plugin.deprecated:
            log.warning("plugin %s (%s): %s", plugin.name, plugin, said)
    for name in switches.enabled or ():
        if not any(plugin.answers_to(name) for plugin in manager.plugins):
            log.warning("plugin %s is enabled but not installed", name)
    return manager
