"""A time limit for waits."""

from __future__ import annotations

import time


class Deadline:
    """A common time limit for several waits, `seconds` from now."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if no time is left."""
        return time.monotonic() >= self._end
