"""Host memory that several processes map. It has no file name, so nothing is left over if a process is killed."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from enginehouse.engines.weights import ParamMeta, WeightSyncError

CGROUPS = Path("/sys/fs/cgroup")
"""Directory of Linux's memory limits for containers (cgroups, version 2)."""


class AnonymousMemory:
    """Memory that other processes of the same user on this host can map while this process lives.

    It counts as memory, not as space of `/dev/shm`, and disappears with the last process that maps it.

    Attributes:
        memory: the mapped bytes, writable. They live as long as an object refers to them.
        path: path by which other processes open the memory, while this object lives.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor  # closed by `__del__`, even if the next line fails
        self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    @classmethod
    def create(cls, label: str, size: int, purpose: str) -> AnonymousMemory:
        """Allocate zeroed memory.

        Args:
            label: label that `attach` checks.
            size: number of bytes to allocate; at least 1 is allocated.
            purpose: words that follow "... MiB of memory are needed" in the error message.

        Raises:
            WeightSyncError: there is not enough free memory, or this system is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError("cannot share weights between processes: this needs memfd_create of Linux")
        free = free_bytes()
        needed = WeightSyncError(
            f"{size / 2**20:.0f} MiB of memory are needed {purpose}, and {free / 2**20:.0f} MiB are free"
        )
        if size > free:
            raise needed
        descriptor = os.memfd_create(label)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            os.close(descriptor)
            raise needed from error
        return cls(descriptor)

    @classmethod
    def attach(cls, path: str, label: str) -> AnonymousMemory:
        """Map another process's memory, which stays mapped when that process ends. Raises `OSError` if the memory no
        longer exists, belongs to another user, or has another label."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target != f"/memfd:{label} (deleted)":
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, f"{target!r} is not the memory {label!r}", path)
        return cls(descriptor)

    @property
    def size(self) -> int:
        return len(self.memory)

    def close(self) -> None:
        """Close the descriptor. The memory itself is freed with the last tensor that views it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()


def map_privately(path: str) -> mmap.mmap:
    """Map another process's memory privately. A page is copied when this process first writes to it. Raises `OSError`
    if the memory no longer exists, or belongs to another user."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def lay_out(parameters: Sequence[ParamMeta]) -> tuple[dict[str, int], int]:
    """Place parameters one after the other. Return each parameter's first byte by name, and the total size in bytes."""
    offsets = {}
    end = 0
    for parameter in parameters:
        offsets[parameter.name] = end
        end += parameter.aligned_nbytes
    return offsets, end


def free_bytes() -> int:
    """Return the bytes that this process can still allocate on the host, or within its container's limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        cgroup = CGROUPS / next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
        for group in (cgroup, *cgroup.parents):
            with suppress(OSError, ValueError):  # no such file, or "max"
                limit = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text())
                stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free = min(free, limit - used + int(stats.get("inactive_file", 0)))
    return max(free, 0)
