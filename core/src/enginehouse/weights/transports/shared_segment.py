"""A named segment of POSIX shared memory, mapped into this process."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
from multiprocessing.shared_memory import SharedMemory

from enginehouse.engines.weights import WeightSyncError


class SharedSegment:
    """Shared memory with a name.

    `SharedMemory` makes and removes the name, so that Python's resource tracker removes it if this process is killed.
    The memory is not mapped by `SharedMemory`, for two reasons. Before Python 3.13, attaching registers the name with
    the attaching process's tracker, which would remove the name when that process ends. And the mapping of a
    `SharedMemory` cannot be closed while a tensor views it.

    Attributes:
        memory: the mapped bytes, writable. The mapping lives as long as an object refers to it.
    """

    def __init__(self, name: str, memory: mmap.mmap, owner: SharedMemory | None = None):
        self.name = name
        self.memory = memory
        self._owner = owner

    @staticmethod
    def name_of(session: str) -> str:
        """Return the name of a session's segment. It is short, because some systems allow only 31 characters."""
        return "eh-" + hashlib.blake2s(session.encode(), digest_size=10).hexdigest()

    @classmethod
    def create(cls, name: str, size: int) -> SharedSegment:
        """Make a segment of `size` zero bytes, all allocated. Raises `WeightSyncError` if there is not enough shared
        memory, or the name is taken."""
        try:
            owner = SharedMemory(name, create=True, size=size)
        except FileExistsError as error:
            raise WeightSyncError(f"a session must have one sender, but {name!r} exists in shared memory") from error
        owner.close()
        try:
            return cls(name, _map(name, allocate=True), owner)
        except OSError as error:
            owner.unlink()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise WeightSyncError(
                f"a weight transfer needs {size} bytes of /dev/shm, and {shutil.disk_usage('/dev/shm').free} are free"
            ) from error

    @classmethod
    def attach(cls, name: str) -> SharedSegment:
        """Map the segment of another process of this host, or raise `FileNotFoundError` if there is none."""
        return cls(name, _map(name, allocate=False))

    def unlink(self) -> None:
        """Remove the name if this process made it. The memory is freed with the last mapping. May be called twice."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.unlink()


def _map(name: str, allocate: bool) -> mmap.mmap:
    import _posixshmem  # SharedMemory uses it too, but cannot attach without a tracker before Python 3.13

    descriptor = _posixshmem.shm_open("/" + name, os.O_RDWR, mode=0o600)
    try:
        size = os.fstat(descriptor).st_size
        if allocate and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # so a full /dev/shm is an error here, not SIGBUS at a later write
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
