"""In place of sgl-kernel, SGLang's own kernels, of which the package index has builds for CUDA alone.

SGLang imports names of it where it runs on a CPU (`srt/mem_cache/allocation.py`, `kernels/ops/kvcache/cache_move.py`)
and calls them where that has Intel's AMX. One operator it calls on each: the hash that draws a token by a request's
seed.
"""

from __future__ import annotations

from typing import Any

import torch

LOW = 0xFFFFFFFF
"""Bits of 32-bit arithmetic, which is done in 64-bit integers: torch has few operators for unsigned ones."""


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits, seed 0) of sixteen bytes: a request's seed, its position, a token.

    Stands in for the operator of that name, called by `murmur_hash32` in `sglang/kernels/ops/sampling/murmur_hash.py`,
    whose kernel for GPUs gives the same numbers.

    Args:
        seed: one a row; int64 or uint64, `(rows,)`.
        positions: the place in its sequence of the token each row draws; integers, `(rows,)`.
        col_indices: token ids; integers, `(tokens,)`.

    Returns:
        uint32, `(rows, tokens)`.
    """
    words = seed.view(torch.int64)
    hashed = torch.zeros_like(words)
    for word in (words & LOW, (words >> 32) & LOW, positions.to(torch.int64) & LOW):
        hashed = _mixed(hashed, word)
    hashed = _mixed(hashed[:, None], col_indices.to(torch.int64)[None, :] & LOW) ^ 16  # the number of bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & LOW
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


@murmur_hash32_cpu.register_fake
def _(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


def _mixed(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """The hash with four more bytes in it."""
    word = (_rotated((word * 0xCC9E2D51) & LOW, 15) * 0x1B873593) & LOW
    return (_rotated(hashed ^ word, 13) * 5 + 0xE6546B64) & LOW


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & LOW


NAMES: dict[str, Any] = {}
"""What the package has beside stand-ins."""

NAMES_UNDER: dict[str, dict[str, Any]] = {}
"""The same of its modules."""
