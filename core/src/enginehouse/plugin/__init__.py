"""The interface for authors of plugins, and enginehouse's access to their declarations.

This package imports neither torch, ray nor pydantic.
"""

from enginehouse.plugin.errors import PluginError, PluginLookupError
from enginehouse.plugin.hookspecs import CONTRACT, hookimpl
from enginehouse.plugin.loaded import Plugin, Provided
from enginehouse.plugin.manager import PluginManager, load_plugins
from enginehouse.plugin.placement import Placement
from enginehouse.plugin.process import configure_plugins, plugins, reload_plugins
from enginehouse.plugin.records import (
    KINDS,
    Advantage,
    Backend,
    DispatchMode,
    Environment,
    Filter,
    Function,
    Layout,
    Loss,
    Record,
    RequirementSet,
    ResolveError,
    Reward,
    RolloutBackend,
    Stage,
    Tracker,
    TrainBackend,
    Transport,
    batched_reward,
    checked_reward,
    resolve,
)  # fmt: skip

__all__ = [
    "CONTRACT",
    "KINDS",
    "Advantage",
    "Backend",
    "DispatchMode",
    "Environment",
    "Filter",
    "Function",
    "Layout",
    "Loss",
    "Placement",
    "Plugin",
    "PluginError",
    "PluginLookupError",
    "PluginManager",
    "Provided",
    "Record",
    "RequirementSet",
    "ResolveError",
    "Reward",
    "RolloutBackend",
    "Stage",
    "Tracker",
    "TrainBackend",
    "Transport",
    "batched_reward",
    "checked_reward",
    "configure_plugins",
    "hookimpl",
    "load_plugins",
    "plugins",
    "reload_plugins",
    "resolve",
]
