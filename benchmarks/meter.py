"""Measures the CPU seconds per step and the memory of a running program and the processes below it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil


class Meter:
    """Looks at a program again and again, as the `look` of `benchmarks.runs.execute`.

    Args:
        marks: file to which the program writes a line at the end of each step.
        every: minimum seconds between two looks.
        memory_every: minimum seconds between two looks at memory.

    Attributes:
        cpu_seconds: CPU seconds of all processes until the end of each step.
        largest_bytes: peak resident memory of a single process, as the system counts it.
        all_bytes: largest memory of all processes at one look; shared memory is counted once.
    """

    def __init__(self, marks: Path, every: float = 0.2, memory_every: float = 1.0):
        self._marks, self._every, self._memory_every = marks, every, memory_every
        self._looked_at = self._weighed_at = 0.0
        self.cpu_seconds: list[float] = []
        self.largest_bytes = self.all_bytes = 0

    def __call__(self, pid: int) -> None:
        """Look if enough time has passed."""
        now = time.monotonic()
        if now - self._looked_at < self._every:
            return
        self._looked_at = now
        with suppress(psutil.NoSuchProcess):
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            lines = self._marks.read_bytes().count(b"\n") if self._marks.exists() else 0
            if lines > len(self.cpu_seconds):
                used = sum(map(_cpu_seconds, processes))
                self.cpu_seconds += [used] * (lines - len(self.cpu_seconds))
            if now - self._weighed_at > self._memory_every:
                self._weighed_at = now
                self.largest_bytes = max(
                    self.largest_bytes, *(_read_kib(each.pid, "status", "VmHWM") for each in processes)
                )
                self.all_bytes = max(
                    self.all_bytes, sum(_read_kib(each.pid, "smaps_rollup", "Pss") for each in processes)
                )

    def cpu_seconds_a_step(self) -> float:
        """Return the mean CPU seconds of a step, without the first.

        Raises:
            RuntimeError: fewer than two steps were seen.
        """
        if len(self.cpu_seconds) < 2:
            raise RuntimeError(f"{self._marks} has {len(self.cpu_seconds)} steps; at least two are needed")
        return (self.cpu_seconds[-1] - self.cpu_seconds[0]) / (len(self.cpu_seconds) - 1)


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


def _read_kib(pid: int, file: str, field: str) -> int:
    """Return a field in KiB of a file in `/proc`, in bytes; 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return 0
