"""The version of the wire format, in its own module because the format imports torch."""

from __future__ import annotations

WIRE_VERSION = 1
"""Version of the format in `enginehouse.data.wire`. Increase it with each change that an older reader would misread."""
