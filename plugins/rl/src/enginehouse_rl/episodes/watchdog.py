"""Notices what blocks an event loop on which environments run: one that blocks holds up all episodes of its process."""

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
"""A loop that does not get on from one of so many looks to the next is blocked. They are counted, not timed: where the
whole process or machine stood still, looks are late as well."""
MOST_FRAMES = 8
PACKAGE_FOLDERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Where a frame is the standard library's, or a package's: an environment's own line is more telling."""


class LoopWatchdog:
    """A thread that looks whether a loop gets on; it warns once, and says at which line that stands.

    Code that holds the interpreter's lock holds up the thread too: there is nothing said of it then.

    Args:
        loop: that loop. This is made on it.
        environment: whose episodes run there, for the message.
        look_seconds: from one look to the next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, environment: str, look_seconds: float = LOOK_SECONDS):
        self._loop, self._environment, self._look_seconds = loop, environment, look_seconds
        self._ident = threading.get_ident()
        self._beats = 0
        self._closed = threading.Event()
        self._beat()
        threading.Thread(target=self._watch, name="event loop watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _beat(self) -> None:
        self._beats += 1
        if not self._closed.is_set():
            self._loop.call_later(self._look_seconds / 2, self._beat)

    def _watch(self) -> None:
        seen, looks = 0, 0
        while not self._closed.wait(self._look_seconds) and not self._loop.is_closed():
            seen, looks = self._beats, looks + 1 if seen == self._beats else 0
            if looks >= BLOCKED_LOOKS and (frame := sys._current_frames().get(self._ident)) is not None:
                self._warn(frame, looks * self._look_seconds)
                return

    def _warn(self, frame: FrameType, seconds: float) -> None:
        task = asyncio.current_task(self._loop)
        name = f" ({task.get_name()})" if task is not None else ""
        frames: list[FrameType] = []
        below: FrameType | None = frame
        while below is not None and below.f_code.co_filename != asyncio.events.__file__:
            frames.append(below)
            below = below.f_back
        own = next((one for one in frames if not one.f_code.co_filename.startswith(PACKAGE_FOLDERS)), frame)
        stack = "".join(f"\n  {_describe_frame(one)}" for one in reversed(frames[:MOST_FRAMES]))
        log.warning(
            "environment %r: the event loop has stood for %g s at %s%s, and with it all episodes that are played in "
            "this process. Await what takes time: an asynchronous client, or asyncio.to_thread for a call that blocks. "
            "It stands at, innermost last:%s",
            self._environment, seconds, _describe_frame(own), name, stack,
        )  # fmt: skip


def _describe_frame(frame: FrameType) -> str:
    """File, line, function and source of a frame."""
    code = frame.f_code
    source = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}" + (f": {source}" if source else "")
