"""The watchdog detects code that blocks an environment's event loop. Such code stops all episodes of the process."""

from __future__ import annotations

import asyncio
import linecache
import logging
import sys
import sysconfig
import threading
from types import FrameType

log = logging.getLogger(__name__)

BLOCKED_LOOKS = 5
LOOK_SECONDS = 1.0
"""Seconds between two checks. A loop counts as blocked if it makes no progress during `BLOCKED_LOOKS` consecutive
checks. The watchdog counts checks, not seconds, because the checks are late too if the whole process or machine stands
still."""
MOST_FRAMES = 8
PACKAGE_FOLDERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of the standard library and of packages. A stack frame outside them belongs to the environment's code."""


class LoopWatchdog:
    """A thread that checks whether an event loop makes progress. It warns once, and names the line that blocks the
    loop.

    If that code holds the GIL, it blocks this thread too, so no warning appears.

    Args:
        loop: The event loop. The watchdog must be created on it.
        environment: Name of the environment whose episodes run on the loop, for the message.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, environment: str, look_seconds: float = LOOK_SECONDS):
        self._loop, self._environment, self._look_seconds = loop, environment, look_seconds
        self._ident = threading.get_ident()
        self._beats = 0
        self._closed = threading.Event()
        self._beat()
        threading.Thread(target=self._watch, name="event loop watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _beat(self) -> None:
        self._beats += 1
        if not self._closed.is_set():
            self._loop.call_later(self._look_seconds / 2, self._beat)

    def _watch(self) -> None:
        last_beats, looks = 0, 0
        while not self._closed.wait(self._look_seconds) and not self._loop.is_closed():
            last_beats, looks = self._beats, looks + 1 if last_beats == self._beats else 0
            if looks >= BLOCKED_LOOKS and (frame := sys._current_frames().get(self._ident)) is not None:
                self._warn(frame, looks * self._look_seconds)
                return

    def _warn(self, innermost: FrameType, seconds: float) -> None:
        task = asyncio.current_task(self._loop)
        name = f" ({task.get_name()})" if task is not None else ""
        frames: list[FrameType] = []
        outer: FrameType | None = innermost
        while outer is not None and outer.f_code.co_filename != asyncio.events.__file__:
            frames.append(outer)
            outer = outer.f_back
        environment_frame = next(
            (frame for frame in frames if not frame.f_code.co_filename.startswith(PACKAGE_FOLDERS)), innermost
        )
        stack = "".join(f"\n  {_describe_frame(frame)}" for frame in reversed(frames[:MOST_FRAMES]))
        log.warning(
            "environment %r: the event loop has been blocked for %g s at %s%s, and so are all episodes in this "
            "process. Do not block the event loop: use an asynchronous client, or asyncio.to_thread for a call that "
            "blocks. The stack of the blocking code, innermost call last:%s",
            self._environment, seconds, _describe_frame(environment_frame), name, stack,
        )  # fmt: skip


def _describe_frame(frame: FrameType) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}" + (f": {source}" if source else "")
