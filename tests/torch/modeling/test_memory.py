"""Running out of memory: recognised however it is said, and told once, with who, what and what needs less."""

import errno
import resource

import pytest
import torch
from torch_train_cases import POLICY, batch_of, make_engine

from enginehouse.engines.model import ProcessContext
from enginehouse.engines.train import LossSpec
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.memory import MemoryGuard, OutOfMemory, is_out_of_memory, keep_freed_memory

TOO_MUCH = 1 << 60
"""More bytes than any machine has."""


@pytest.mark.parametrize("allocate", [lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), lambda: bytearray(TOO_MUCH)])
def test_a_failed_allocation_is_told_with_rank_and_cures(allocate):
    guard = MemoryGuard(ProcessContext(role="critic", rank=2, world_size=4), ("fewer tokens", "more ranks"))
    with pytest.raises(OutOfMemory) as caught, guard.during("adding up"):
        allocate()
    said = str(caught.value)
    assert said.startswith("critic rank 2/4 on localhost: out of memory while adding up (")
    assert said.endswith("Less is needed with: fewer tokens; more ranks")
    assert is_out_of_memory(caught.value.__cause__)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory of the reader"), False),
    ],
)
def test_what_says_so_is_recognised_and_nothing_else(error, is_one):
    guard = MemoryGuard(ProcessContext(role="actor"), ())
    with pytest.raises(OutOfMemory if is_one else type(error)), guard.during("computing"):
        raise error


def test_an_error_inside_keeps_the_innermost_words():
    guard = MemoryGuard(ProcessContext(role="actor"), ())
    with (
        pytest.raises(OutOfMemory, match="while reading one"),
        guard.during("reading all"),
        guard.during("reading one"),
    ):
        raise MemoryError


def test_the_torch_engine_says_which_micro_batch_was_too_much():
    engine = make_engine(tiny_model())
    batch = batch_of([[3, 4, 5], [3, 4]], [[False, True, True], [False, True]])
    with pytest.raises(OutOfMemory, match=r"rank 0/1 .* micro-batch of \d+ tokens .* tokens_per_microbatch"):
        engine.forward_backward(batch, LossSpec("torch_train_cases:exhausting"))
    engine.forward_backward(batch, POLICY)


def test_memory_that_was_freed_is_used_again():
    if not keep_freed_memory():
        pytest.skip("the allocator is not glibc's")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(1 << 22) for _ in range(4)]  # more than glibc keeps by itself: twice its largest block
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # The first few make room. Without it each faults in all of its 16,384 pages of 4 KiB.
    assert min(faults() for _ in range(8)) < 1000
