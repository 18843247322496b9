"""The host's memory: kept for what comes next; and what is said when memory, of any kind, runs out."""

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
"""How a `RuntimeError` of torch says that memory ran out, where it has no type of its own for it."""


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Numbers of two of `mallopt`'s parameters."""
LARGEST_MMAP_THRESHOLD = 1 << 25
"""The largest one that glibc takes: larger blocks always come fresh."""
KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Have the process keep what it frees, up to `KEPT_BYTES`, rather than return it after every pass.

    The kernel hands out fresh pages one fault at a time, which takes longer than most operations on them.

    Returns:
        Whether its allocator is one that can be told so: glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))


class OutOfMemory(EnginehouseError):
    """A device's or the host's memory ran out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, of a GPU or of the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)
    return isinstance(error, MemoryError)


class MemoryGuard:
    """Turns running out of memory into one error that helps.

    Args:
        context: whose memory it is.
        cures: what needs less of it, each an option of the backend and what it does.
    """

    def __init__(self, context: ProcessContext, cures: Sequence[str]):
        self._context = context
        self._cures = tuple(cures)

    @contextlib.contextmanager
    def during(self, doing: str) -> Iterator[None]:
        """Guard a block.

        Args:
            doing: what it does, in the words of the message.

        Raises:
            OutOfMemory: memory ran out in it; the cause is chained.
        """
        try:
            yield
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            where = "GPU memory" if self._context.device == "cuda" else "memory"
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise OutOfMemory(
                f"{self._context}: out of {where} while {doing} ({said}). Less is needed with: {'; '.join(self._cures)}"
            ) from error
