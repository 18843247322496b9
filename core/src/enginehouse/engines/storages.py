"""Returns memory to the system and allocates it again, for engines that sleep or are offloaded."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["give_back_freed_memory", "give_up", "take_back"]


def give_up(storage: torch.UntypedStorage) -> None:
    """Release the memory of a storage, whose content is lost. References to the storage stay valid.

    A GPU storage becomes empty. A CPU storage keeps its addresses, and the system takes the pages behind them. A resize
    is not possible, because arrays that share the storage must stay valid.
    """
    if storage.device.type == "cuda":
        storage.resize_(0)
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size > 0 and sys.platform == "linux":  # on other systems the pages may stay
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def take_back(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Allocate `nbytes` for a storage that was given up. Its content is undefined."""
    if storage.device.type == "cuda":
        storage.resize_(nbytes)


def give_back_freed_memory() -> None:
    """Return freed memory that the process still holds to the system, if its allocator supports that."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
