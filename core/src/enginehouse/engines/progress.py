"""What tells an engine that works from one that hangs: when it last got on with what it does.

A call of a worker may take as long as it likes while it gets on; once nothing has been noted for the time limit of a
call (`cluster.call_timeout_seconds`), it has failed. Workers note each optimizer step and each request that ends. An
engine that takes long between these notes what it does meanwhile; the limit then counts from there.
"""

from __future__ import annotations

import time

__all__ = ["note_progress"]

_last = float("-inf")


def note_progress() -> None:
    """This process got on: a micro-batch was computed, a token drawn. Cheap, and from any thread."""
    global _last
    _last = time.monotonic()


def idle_seconds() -> float:
    """How long ago this process got on last; infinite where it never did."""
    return time.monotonic() - _last
