"""Host memory that several processes map. It has no file name, so nothing is left over if a process is killed."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

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
    """Return the bytes of a new `PrivateMemory`."""
    return PrivateMemory(path).memory


class PrivateMemory:
    """Another process's memory, mapped privately: a page is copied when this process first writes to it.

    A mapping can be kept for the next version in the same memory, because to map each page anew takes as long as to sum
    it. The memory then lives at least until the first `take` after its path leads to it no longer.

    Attributes:
        memory: the mapped bytes.

    Raises:
        OSError: the memory no longer exists, or belongs to another user.
    """

    _kept: ClassVar[dict[str, PrivateMemory]] = {}

    def __init__(self, path: str):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._path, self._file = path, _identify(descriptor)
            self.memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)

    @classmethod
    def take(cls, path: str) -> PrivateMemory:
        """Return the kept mapping of the memory at `path`, or a new one."""
        for kept in [*cls._kept.values()]:
            if _identify(kept._path) != kept._file:
                del cls._kept[kept._path]
        return cls._kept.pop(path, None) or cls(path)

    def keep(self) -> None:
        """Keep the mapping, which no tensor may view any more, unless this process has written to a page."""
        if not _has_copied_pages(self.memory):
            self._kept[self._path] = self


def _identify(file: str | int) -> tuple[int, int] | None:
    """Return the numbers that no other memory has while this memory exists; None if there is nothing at the path."""
    with suppress(OSError):
        status = os.stat(file)
        return status.st_dev, status.st_ino
    return None


def _has_copied_pages(memory: mmap.mmap) -> bool:
    """Return True if a page of a private mapping was copied, or if the kernel does not say."""
    import numpy as np

    first = np.frombuffer(memory, np.uint8).ctypes.data // mmap.PAGESIZE
    count = -(-len(memory) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(first * 8)
            states = np.frombuffer(pages.read(count * 8), np.uint64) >> 61  # three bits: shared, swapped, present
    except OSError:
        return True
    return len(states) < count or bool(((states > 1) & (states % 2 == 0)).any())


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
