"""From a transport's name to the transport."""

from __future__ import annotations

from enginehouse.engines.weights import WeightTransport
from enginehouse.plugin import plugins, resolve


def load_transport(name: str) -> WeightTransport:
    """Make the transport a config names: a registered name, `"distribution:name"`, or `"module:Class"`.

    Raises:
        PluginLookupError: no such transport.
        ResolveError: its module or class is not there.
    """
    found = plugins()
    return resolve(found.get("transport", name).transport if found.is_name(name) else name)()
