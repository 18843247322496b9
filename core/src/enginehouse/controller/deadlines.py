"""The time until a deadline."""

from __future__ import annotations

import time


def seconds_left(until: float | None) -> float | None:
    """Return the seconds from now to the deadline `until`, a time of `time.monotonic()`, but at least 0.1. Return None
    if there is no deadline."""
    return None if until is None else max(until - time.monotonic(), 0.1)
