"""Losses that fail in the middle of an update, or never return."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import torch

from enginehouse_rl.losses.clipped_policy import clipped_policy

_calls = 0


def stuck_at(view, *, call: int, marks: str):
    """The clipped policy loss, but for one call, which leaves a file named after the process and never returns.

    Args:
        call: which one, counted from 1 in each process.
        marks: directory for the file.
    """
    global _calls
    _calls += 1
    if _calls == call:
        (Path(marks) / str(os.getpid())).touch()
        threading.Event().wait()
    return clipped_policy(view)


def stuck_at_rank_1(view, *, call: int, marks: str):
    """As `stuck_at`, on rank 1 alone: the other ranks go on to the next thing that ranks do together, and wait there.

    Each rank leaves a file named after the process as it enters the call.
    """
    global _calls
    _calls += 1
    if _calls == call:
        (Path(marks) / str(os.getpid())).touch()
        if os.environ["RANK"] == "1":
            threading.Event().wait()
    return clipped_policy(view)


def raise_at_rank_1(view, *, call: int):
    """The clipped policy loss, but for one call, which raises on rank 1 while the other ranks wait for it."""
    global _calls
    _calls += 1
    if _calls == call and os.environ["RANK"] == "1":
        raise ArithmeticError("no gradient today")
    return clipped_policy(view)


def out_of_memory_at_rank_1(view, *, call: int):
    """The clipped policy loss, but in one call rank 1 asks for more memory than there is."""
    global _calls
    _calls += 1
    if _calls == call and os.environ["RANK"] == "1":
        torch.empty(1 << 60, dtype=torch.uint8)
    return clipped_policy(view)


def not_a_number(view):
    """The clipped policy loss, made NaN."""
    value = clipped_policy(view)
    return replace(value, total=value.total * float("nan"))


def flat(view):
    """The clipped policy loss, with no gradient."""
    value = clipped_policy(view)
    return replace(value, total=value.total * 0.0)
