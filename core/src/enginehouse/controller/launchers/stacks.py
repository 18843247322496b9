"""Formats the Python stacks of a process's threads and of the coroutines on its event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

OURS = "/enginehouse/controller/launchers/"
"""Path of the launchers' code. Messages omit the frames of this code and the frames before it."""


def process_stacks(busy: Mapping[int, str], loop: asyncio.AbstractEventLoop | None) -> str:
    """Format the stacks of this process, with the stacks of working threads first.

    Args:
        busy: the call of each working thread, by thread id.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    parts = [_format_thread(f"thread running {busy[ident]}", frames[ident]) for ident in frames if ident in busy]
    if loop is not None:
        parts += _format_coroutines(loop)
    idle = [ident for ident in frames if ident not in busy]
    return "\n".join(parts + [_format_thread(f"thread {names.get(ident, ident)}", frames[ident]) for ident in idle])


def _format_thread(title: str, frame: FrameType) -> str:
    frames = traceback.extract_stack(frame)
    indices = [index for index, summary in enumerate(frames) if OURS in summary.filename.replace("\\", "/")]
    start = indices[-1] + 1 if indices and indices[-1] + 1 < len(frames) else 0
    return f"{title}:\n" + "".join(traceback.format_list(frames[start:])).rstrip()


def _format_coroutines(loop: asyncio.AbstractEventLoop) -> list[str]:
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the set changed while it was copied
        return []
    return [f"coroutine {task.get_name()}:\n{_format_awaited(task.get_coro())}" for task in tasks if not task.done()]


def _format_awaited(awaited: Any) -> str:
    """Format the chain of coroutines that a suspended coroutine awaits, outermost first. `Task.get_stack` returns only
    the frame of the outermost coroutine."""
    lines = []
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return "\n".join(lines)
