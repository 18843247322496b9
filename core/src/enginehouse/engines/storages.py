"""Giving memory up to the system and taking it back, for engines that sleep or are offloaded."""

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
    """Give up the memory of a storage, whose content is lost; whatever refers to it goes on to.

    A GPU's is made empty. A CPU's keeps its addresses, and the system takes the pages behind them: arrays that share
    it go on to, and forbid that it be resized.
    """
    if storage.device.type == "cuda":
        storage.resize_(0)
        return
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size > 0 and sys.platform == "linux":  # elsewhere it does not mean that they are gone
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def take_back(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Have the memory of a storage that was given up, of so many bytes; what is in it is left open."""
    if storage.device.type == "cuda":
        storage.resize_(nbytes)


def give_back_freed_memory() -> None:
    """Give the system what the process has freed and kept, where its allocator is one that can be told so."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
