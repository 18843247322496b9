"""Ends vLLM's processes when the process that started them ends.

vLLM loads this module in each of its processes as a general plugin. vLLM ends its own processes when it is shut down.
If the parent is killed instead, the processes would stay, with all their memory and the shared memory by which they
communicate.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

LAUNCHER = "ENGINEHOUSE_VLLM_LAUNCHER"
"""Environment variable with the process id of the worker that launched the engine."""

GRACE_SECONDS = 5.0
"""Seconds that a process has to clean up before it is killed."""

SHARED_MEMORY = Path("/dev/shm")
"""Folder where Linux shows named shared memory."""

NAMES = ("psm_", "sem.mp-", "vllm")
"""Prefixes of names that Python's multiprocessing and vLLM use in `SHARED_MEMORY`."""

_watching = threading.Lock()


def register() -> None:
    """End this process when its parent ends. vLLM calls it in each of its processes, maybe repeatedly."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or int(launcher) == os.getpid() or not _watching.acquire(blocking=False):
        return
    threading.Thread(target=_follow, name="enginehouse-orphans", daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    with suppress(psutil.Error):
        # Children too, because they may be killed before they clean up.
        for pid in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))):
            for path in find_named_memory(pid):
                with suppress(OSError):  # another process of the replica was first
                    path.unlink()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def find_named_memory(pid: int) -> list[Path]:
    """Return the shared memory of multiprocessing or vLLM that a process has mapped and that still has its name.

    Names are random and only a replica's own processes learn them, so nobody uses the memory of a dead replica.
    Removing a name takes nothing from a process that has it mapped.
    """
    try:
        lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    except OSError:  # not on Linux, or no such process
        return []
    paths = {Path(line.partition("/")[1] + line.partition("/")[2]) for line in lines if "/" in line}
    return sorted(
        path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(NAMES) and path.exists()
    )
