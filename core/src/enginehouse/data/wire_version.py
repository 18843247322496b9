"""The version of the wire format, apart from the format itself, which takes torch to import."""

from __future__ import annotations

WIRE_VERSION = 1
"""Version of the format in `enginehouse.data.wire`. Raise it with every change that an older reader would get wrong."""
