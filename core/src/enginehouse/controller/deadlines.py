"""Deadlines: what is left of one, for a call that has to have some."""

from __future__ import annotations

import time


def seconds_left(until: float | None) -> float | None:
    """Return the seconds until a time of `time.monotonic()`, at least a tenth; None: there is no limit."""
    return None if until is None else max(until - time.monotonic(), 0.1)
