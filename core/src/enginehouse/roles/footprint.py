"""Measures the device memory that a worker frees."""

from __future__ import annotations

import sys

import psutil


def held_bytes(device: str) -> int | None:
    """Return the bytes of a device's memory that this process holds; None if unknown.

    Args:
        device: `"cpu"`: resident memory, with child processes. `"cuda"`: memory that torch reserved in this process;
            memory of engines in other processes is unknown.
    """
    if device == "cpu":
        process = psutil.Process()
        return sum(_resident_bytes(member) for member in (process, *process.children(recursive=True)))
    torch = sys.modules.get("torch")
    return torch.cuda.memory_reserved() if torch is not None and torch.cuda.is_initialized() else None


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # the process has ended
        return 0


def freed_bytes(device: str, before: int | None) -> int | None:
    """Return how many bytes fewer than `before` this process holds; None if unknown."""
    after = held_bytes(device)
    return None if before is None or after is None else max(before - after, 0)
