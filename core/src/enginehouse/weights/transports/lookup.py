"""Finds a weight transport by its name."""

from __future__ import annotations

from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import plugins, resolve


def load_transport(name: str) -> WeightTransport:
    """Make the transport of a registered name, `"distribution:name"`, or `"module:Class"`.

    Raises:
        PluginLookupError: there is no such transport.
        ResolveError: its module or class does not exist.
    """
    manager = plugins()
    return resolve(manager.get("transport", name).transport if manager.is_name(name) else name)()
