"""Stands in for sgl-kernel, SGLang's own kernels, which the package index only has for CUDA.

On a CPU SGLang imports names of it (`srt/mem_cache/allocation.py`, `kernels/ops/kvcache/cache_move.py`) and calls them
if the CPU has Intel's AMX. It calls one operator on every CPU: the hash that samples a token by a request's seed.
"""

from __future__ import annotations

from typing import Any

import torch

LOW = 0xFFFFFFFF
"""Mask for 32-bit arithmetic in 64-bit integers, because torch has few operators for unsigned ones."""


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (x86, 32 bits, seed 0) of sixteen bytes: a request's seed, a position, a token.

    Stands in for the operator of that name, called by `murmur_hash32` in `sglang/kernels/ops/sampling/murmur_hash.py`,
    whose kernel for GPUs gives the same numbers.

    Args:
        seed: Seed of each row; int64 or uint64, `(rows,)`.
        positions: Position in its sequence of the token that each row samples; integers, `(rows,)`.
        col_indices: Token ids; integers, `(tokens,)`.

    Returns:
        uint32, `(rows, tokens)`.
    """
    words = seed.view(torch.int64)
    hashed = torch.zeros_like(words)
    for word in (words & LOW, (words >> 32) & LOW, positions.to(torch.int64) & LOW):
        hashed = _mix(hashed, word)
    hashed = _mix(hashed[:, None], col_indices.to(torch.int64)[None, :] & LOW) ^ 16  # the number of bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & LOW
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


@murmur_hash32_cpu.register_fake
def _(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)


def _mix(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Add four bytes to the hash."""
    word = (_rotate((word * 0xCC9E2D51) & LOW, 15) * 0x1B873593) & LOW
    return (_rotate(hashed ^ word, 13) * 5 + 0xE6546B64) & LOW


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & LOW


NAMES: dict[str, Any] = {}
"""Names that the package has in addition to stand-ins."""

NAMES_UNDER: dict[str, dict[str, Any]] = {}
"""Names that its modules have in addition to stand-ins."""
