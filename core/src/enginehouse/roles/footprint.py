"""How much memory of its device a worker holds."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import psutil


def held_bytes(device: str) -> int | None:
    """Bytes of the device's memory that this process holds.

    Args:
        device: `"cpu"`: what is resident, of the processes that it started too. `"cuda"`: what torch has reserved in
            this process; engines whose processes are others cannot be asked.

    Returns:
        None where it cannot be told.
    """
    if device == "cpu":
        process = psutil.Process()
        return sum(_resident(one) for one in (process, *process.children(recursive=True)))
    torch = sys.modules.get("torch")
    return torch.cuda.memory_reserved() if torch is not None and torch.cuda.is_initialized() else None


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it has ended
        return 0


def freed_bytes(device: str, free: Callable[[], object]) -> int | None:
    """Call `free`, and return how much less this process holds then."""
    before = held_bytes(device)
    free()
    return _less(before, held_bytes(device))


async def freed_bytes_of(device: str, free: Awaitable[object]) -> int | None:
    """As `freed_bytes`, of what is awaited."""
    before = held_bytes(device)
    await free
    return _less(before, held_bytes(device))


def _less(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(before - after, 0)
