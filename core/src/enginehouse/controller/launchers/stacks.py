"""What a process is doing right now: Python stacks of its threads and of the coroutines on its event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

OURS = "/enginehouse/controller/launchers/"
"""The machinery a call passes through in a worker: what is below it tells a user nothing."""


def process_stacks(busy: Mapping[int, str], loop: asyncio.AbstractEventLoop | None) -> str:
    """Format the stacks of this process, those at work first.

    Args:
        busy: thread ids that run a call, and which.
        loop: the event loop, for its coroutines.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    at_work = [ident for ident in frames if ident in busy]
    parts = [_thread(f"thread running {busy[ident]}", frames[ident]) for ident in at_work]
    if loop is not None:
        parts += _coroutines(loop)
    parts += [_thread(f"thread {names.get(ident, ident)}", frames[ident]) for ident in frames if ident not in busy]
    return "\n".join(parts)


def _thread(title: str, frame: FrameType) -> str:
    frames = traceback.extract_stack(frame)
    ours = [index for index, one in enumerate(frames) if OURS in one.filename.replace("\\", "/")]
    start = ours[-1] + 1 if ours and ours[-1] + 1 < len(frames) else 0
    return f"{title}:\n" + "".join(traceback.format_list(frames[start:])).rstrip()


def _coroutines(loop: asyncio.AbstractEventLoop) -> list[str]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the set changed while it was copied
        return []
    return [f"coroutine {task.get_name()}:\n{_awaiting(task.get_coro())}" for task in tasks if not task.done()]


def _awaiting(awaited: Any) -> str:
    """The chain of what a suspended coroutine awaits, outermost first; `Task.get_stack` gives only its first frame."""
    lines = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(lines)
