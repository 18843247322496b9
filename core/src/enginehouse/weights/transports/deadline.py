"""A time limit for waits."""

from __future__ import annotations

import time

from enginehouse.engines.progress import note_progress


class Deadline:
    """A common time limit for several waits, `seconds` from now or from the last progress."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now, because there was progress, and note it for this process."""
        note_progress()
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if no time is left."""
        return time.monotonic() >= self._end
