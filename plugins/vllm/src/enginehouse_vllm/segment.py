"""Memory that a rollout worker shares with vLLM's processes beneath it. It has no name, so nothing can stay behind."""

from __future__ import annotations

import mmap
import os

import psutil

from enginehouse.engines.weights import WeightSyncError


class Segment:
    """Anonymous memory of this process that others of the same user can map, by `path`, as long as this one lives.

    It counts as memory, not as space of `/dev/shm`, and is gone with the last process that maps it.

    Args:
        size: bytes, all of them allocated here.

    Raises:
        WeightSyncError: there is not as much free memory.
    """

    def __init__(self, size: int):
        free = psutil.virtual_memory().available
        if size > free:
            raise WeightSyncError(
                f"{size / 2**20:.0f} MiB of memory are needed to stage a version of the weights beside the one that is "
                f"served, and {free / 2**20:.0f} MiB are free on this host"
            )
        self._descriptor = os.memfd_create("enginehouse-weights")
        os.posix_fallocate(self._descriptor, 0, max(size, 1))
        self.memory = mmap.mmap(self._descriptor, max(size, 1))
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.memory)

    def close(self) -> None:
        """Let go of it; the memory itself goes with the last tensor that views it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def attach(path: str) -> mmap.mmap:
    """Map another process's segment.

    Raises:
        OSError: it is gone, or of another user.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
