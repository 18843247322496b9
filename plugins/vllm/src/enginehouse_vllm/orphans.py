"""No vLLM process outlives the process that started it; runs in vLLM's engine core and workers, as a general plugin.

vLLM ends its own processes when it is shut down. Where the process above is killed they would stay, with all their
memory: this is for that case.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

LAUNCHER = "ENGINEHOUSE_VLLM_LAUNCHER"
"""Environment variable with the process id of the worker that launched the engine; without it nothing is done."""

GRACE_SECONDS = 5.0
"""How long a process may take to clean up before it is killed."""

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
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
