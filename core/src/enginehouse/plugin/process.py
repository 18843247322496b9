"""The plugins of this process. They are loaded at first use. Switches of environment and config decide which."""

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
    """Return this process's plugins. The first call loads the plugins that the environment's switches allow."""
    global _current
    with _lock:
        if _current is None:
            _current = load_switched(read_switches())
        return _current


def reload_plugins() -> PluginManager:
    """Load this process's plugins again with the same switches, after a plugin was installed."""
    global _current
    with _lock:
        switches = read_switches() if _current is None else _current.switches
        _current = load_switched(switches)
        return _current


def configure_plugins(
    enabled: Sequence[str] | None = None, blocked: Sequence[str] = (), strict: bool = False
) -> PluginManager:
    """Load the plugins of this process with the switches of the config and the environment, and return them.

    Enabled plugins of the environment replace `enabled`; its blocked plugins are added to `blocked`. Call this on the
    controller before any use of a plugin. The function logs a warning for each plugin that could not be loaded, and for
    each deprecated part of the contract that a plugin uses. Worker processes load the same plugins through
    `PluginManager.environment`.

    Args:
        enabled: the only plugins to load, by plugin or distribution name; None loads all.
        blocked: plugins not to load.
        strict: True if a failing observer raises.
    """
    global _current
    switches = Switches(None if enabled is None else tuple(enabled), tuple(blocked), strict).merge(os.environ)
    with _lock:
        if _current is None or _current.switches != switches:
            _current = load_switched(switches)
        manager = _current
    for plugin in manager.plugins:
        if plugin.status in ("broken", "incompatible"):
            log.warning("plugin %s (%s) is %s: %s", plugin.name, plugin, plugin.status, plugin.problem)
        for deprecation in plugin.deprecated:
            log.warning("plugin %s (%s): %s", plugin.name, plugin, deprecation)
    for name in switches.enabled or ():
        if not any(plugin.answers_to(name) for plugin in manager.plugins):
            log.warning("plugin %s is enabled but not installed", name)
    return manager
