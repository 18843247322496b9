"""The time that is left until a deadline."""

from __future__ import annotations

import time


def seconds_left(until: float | None) -> float | None:
    """Return the seconds until a time of `time.monotonic()`, at least a tenth; None: there is no limit."""
    return None if until is None else max(until - time.monotonic(), 0.1)
