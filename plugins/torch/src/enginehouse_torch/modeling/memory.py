"""What is said when memory runs out: who, doing what, with how many tokens, and which options need less."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from enginehouse.errors import EnginehouseError

if TYPE_CHECKING:
    from enginehouse.engines.model import ProcessContext

SIGNS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",  # the same on Windows
    "out of memory",  # CUDA, NCCL
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""How a `RuntimeError` of torch says that memory ran out, where it has no type of its own for it."""


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
