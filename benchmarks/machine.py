"""The machine of a measurement, and how busy it was. Without this a figure means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
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


def commit() -> str:
    """Return the commit of the measured code, with a `+` if files differ from it; empty without git."""
    hashed, differing = (
        subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return f"{hashed}{'+' * bool(differing)}"


def busy_cores(seconds: float = 1.0) -> float:
    """Return the number of cores that others keep busy, measured for `seconds` while this process does nothing."""
    return psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def wanted_seconds_below(pid: int) -> tuple[float, float]:
    """Return the seconds that main threads of the living processes below a process have had a core, and the seconds
    that
    they waited for a core that others had. The rest of the time they had nothing to do."""
    found = [_schedule(child.pid) for child in psutil.Process(pid).children(recursive=True)]
    return sum(had for had, _ in found), sum(waited for _, waited in found)


def _schedule(pid: int) -> tuple[float, float]:
    had, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(had) / 1e9, int(waited) / 1e9


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
