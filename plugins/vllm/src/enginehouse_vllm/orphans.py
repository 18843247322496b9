"""No vLLM process outlives the process that started it; runs in vLLM's engine core and workers, as a general plugin.

vLLM ends its own processes when it is shut down. Where the process above is killed they would stay, with all their
memory, and after them the shared memory by which they talk to each other: this is for that case.
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
"""Environment variable with the process id of the worker that launched the engine; without it nothing is done."""

GRACE_SECONDS = 5.0
"""How long a process may take to clean up before it is killed."""

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux shows named shared memory."""

NAMES = ("psm_", "sem.mp-", "vllm")
"""How what Python's multiprocessing and vLLM put there is called."""

_watching = threading.Lock()


def register() -> None:
    """End this process when the one that started it ends. vLLM calls it in each of its processes, maybe repeatedly."""
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
        # Those beneath too, which may be ended before they get to it.
        for pid in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))):
            for path in mapped_by_name(pid):
                with suppress(OSError):  # another process of the replica was first
                    path.unlink()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def mapped_by_name(pid: int) -> list[Path]:
    """Shared memory of multiprocessing or vLLM that a process has mapped and that still has its name.

    Names are drawn at random, and only a replica's own processes learn them: once the replica is dead, nobody else uses
    what is mapped here. Removing a name takes nothing from a process that has it mapped.
    """
    try:
        lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    except OSError:  # no such place, as elsewhere than on Linux, or no such process
        return []
    paths = {Path(line.partition("/")[1] + line.partition("/")[2]) for line in lines if "/" in line}
    return sorted(
        path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(NAMES) and path.exists()
    )
