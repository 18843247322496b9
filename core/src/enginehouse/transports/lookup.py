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
    module, colon, _ = name.partition(":")
    distributions = {plugin.distribution for plugin in plugins().plugins}
    if colon and module not in distributions:
        return resolve(name)()
    return resolve(plugins().get("transport", name).transport)()
