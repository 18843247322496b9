"""Logging in a worker. Each line has the role and rank, and the last lines are kept for errors."""

from __future__ import annotations

import logging
import sys
from collections import deque

from enginehouse.controller.launchers.role_objects import current_role

KEPT_LINES = 20


class RecentLines(logging.Handler):
    """Keeps the last log lines."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.extend(self.format(record).splitlines())

    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)


def install(group: str, rank: int, world_size: int, level: int) -> RecentLines:
    """Let this process's root logger write to stderr, which is the worker's log file, and to the returned handler."""

    def add_place(record: logging.LogRecord) -> bool:
        record.place = f"{current_role.get() or group} {rank}/{world_size}"
        return True

    formatter = logging.Formatter("%(asctime)s %(levelname)s [%(place)s] %(name)s: %(message)s")
    recent = RecentLines()
    root = logging.getLogger()
    root.setLevel(level)
    for handler in (logging.StreamHandler(sys.stderr), recent):
        handler.setFormatter(formatter)
        handler.addFilter(add_place)
        root.addHandler(handler)
    return recent
