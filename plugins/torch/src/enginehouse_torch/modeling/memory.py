"""Keeps the host's freed memory, and turns running out of memory, on host or device, into one kind of error."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse.engines.model import ProcessContext

__all__ = ["MemoryGuard", "keep_freed_memory"]

SIGNS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",  # the same on Windows
    "out of memory",  # CUDA, NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""Texts of torch's `RuntimeError` that mean that memory ran out."""

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Parameters of `mallopt`."""
LARGEST_MMAP_THRESHOLD = 1 << 25
"""The largest value that glibc accepts; larger blocks are always mapped."""
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let the process keep up to `KEPT_BYTES` of freed memory instead of returning it after every pass.

    The kernel provides fresh pages one fault at a time, which takes longer than most operations on them.

    Returns:
        True if the allocator is glibc, which supports this.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))


class OutOfMemory(EnginehouseError):
    """A device's or the host's memory ran out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception says that memory ran out, of a GPU or of the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)


class MemoryGuard:
    """Turns running out of memory into one error with advice.

    Args:
        context: the process.
        cures: ways to need less memory, each an option of the backend and its effect.
    """

    def __init__(self, context: ProcessContext, cures: Sequence[str]):
        self._context = context
        self._cures = tuple(cures)

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Guard a block.

        Args:
            doing: description of the block's action, for the message.

        Raises:
            OutOfMemory: memory ran out in the block; the cause is chained.
        """
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            where = "GPU memory" if self._context.device == "cuda" else "memory"
            summary = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise OutOfMemory(
                f"{self._context}: out of {where} while {doing} ({summary}). "
                f"Less is needed with: {'; '.join(self._cures)}"
            ) from error
