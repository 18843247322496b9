"""Finds a weight transport by its name."""

from __future__ import annotations

from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import plugins, resolve


def load_transport(name: str) -> WeightTransport:
    """Make a transport by its registered name, by `"distribution:name"`, or by `"module:Class"`.

    Raises:
        PluginLookupError: there is no such transport.
        ResolveError: the module or class does not exist.
    """
    manager = plugins()
    return resolve(manager.get("transport", name).transport if manager.is_name(name) else name)()
