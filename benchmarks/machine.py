"""What a measurement ran on, and how busy it was: a figure without it means nothing."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import psutil


def machine() -> dict[str, object]:
    """Describe this machine: processor, cores, memory in GiB, system, Python, load of the last minute."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that others keep busy, measured over `seconds` while this process does nothing."""
    return psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def cpu_seconds_below(pid: int) -> float:
    """CPU time that the processes below a process have used, those that live."""
    return sum(cpu_seconds(child.pid) for child in psutil.Process(pid).children(recursive=True))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
