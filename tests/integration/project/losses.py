"""A loss that never returns, for runs that are to be caught in the middle of an update."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from enginehouse.rl.losses.clipped_policy import clipped_policy

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
