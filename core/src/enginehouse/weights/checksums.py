"""Computes and compares checksums of weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.errors import listed
from enginehouse.weights.buckets import group_by_bytes

if TYPE_CHECKING:
    import torch

CACHED_BYTES = 1 << 20
"""Block size: small enough to stay in the processor's cache after a copy, and large enough for a fast loop."""

THREADED_BYTES = 8 << 20
"""Smallest number of bytes that several threads sum. Fewer take less time than the threads' start."""
TASK_BYTES = 4 << 20
"""Maximum number of bytes that a thread copies or sums in one task, unless a tensor has more. If each small tensor had
its own task, threads would mostly wait for each other."""
THREADS = min(4, os.cpu_count() or 1)

MIXED = "mixed-"
"""Beginning of a `mixed_checksum`."""
WORDS_AT_ONCE = 1 << 20
"""Number of 8-byte words that are mixed at once: each takes some copies of 8 MiB on the device."""
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
"""Odd factors of 64 bits: the golden ratio's, which spreads places, and the two of MurmurHash3's finalizer."""


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, without shape and dtype: XXH3, 64 bits, in hexadecimal."""
    import torch
    import xxhash

    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def checksums(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the `checksum` of each tensor. Several threads compute them, because memory is faster than one core."""
    if sum(tensor.nbytes for tensor in tensors) < THREADED_BYTES:
        return [checksum(tensor) for tensor in tensors]
    tasks = group_by_bytes(tensors, lambda tensor: tensor.nbytes, TASK_BYTES)
    with ThreadPoolExecutor(THREADS, "checksums") as threads:
        return [total for totals in threads.map(lambda task: [*map(checksum, task)], tasks) for total in totals]


def mixed_checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes that its own device computes: `MIXED` and 64 bits in hexadecimal.

    It is the sum of the number of bytes and of each 8-byte word, mixed with its place by the finalizer of MurmurHash3
    (Appleby 2011), modulo 2^64. A sum needs no order, so a device computes it in parallel, and no byte leaves the
    device. On a CPU `checksum` is faster.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    count = flat.numel() // 8
    words, rest = flat[: count * 8], flat[count * 8 :]
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for begin in range(0, count, WORDS_AT_ONCE):
        total += _mix(words[begin : begin + WORDS_AT_ONCE], begin).sum()
    if len(rest):
        last = torch.nn.functional.pad(rest, (0, 8 - len(rest)))
        total += _mix(last.view(torch.int64), count).sum()
    return f"{MIXED}{int(total) % 2**64:016x}"


def _mix(words: torch.Tensor, first: int) -> torch.Tensor:
    """Mix 64-bit words with their places, of which `first` is the first; in int64, whose products wrap around."""
    import torch

    mixed = words ^ torch.arange(first + 1, first + 1 + len(words), device=words.device) * _signed(GOLDEN)
    for factor in (FIRST, SECOND):
        mixed = (mixed ^ _upper_bits(mixed)) * _signed(factor)
    return mixed ^ _upper_bits(mixed)


def _upper_bits(words: torch.Tensor) -> torch.Tensor:
    """Return the 31 upper bits of 64-bit words."""
    return (words >> 33) & 0x7FFFFFFF


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def checksum_like(tensor: torch.Tensor, other: str | None) -> str:
    """Return the checksum of the same kind as `other`: `mixed_checksum`, or if `other` is none, `checksum`."""
    return mixed_checksum(tensor) if other and other.startswith(MIXED) else checksum(tensor)


def are_of_one_kind(sums: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Return True if all are `checksum`s, or all are `mixed_checksum`s."""
    return len({total.startswith(MIXED) for total in (*sums.values(), *others.values())}) <= 1


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor, block_bytes: int = CACHED_BYTES) -> str:
    """Copy a tensor to a contiguous tensor of the same shape and dtype, both in host memory, and return its `checksum`.

    This is faster than a copy and then a checksum, because each block is summed while it is in the processor's cache.
    """
    import torch
    import xxhash

    read = source.detach().reshape(-1).view(torch.uint8).numpy()
    written = target.view(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_64()
    for begin in range(0, len(read), block_bytes):
        block = read[begin : begin + block_bytes]
        written[begin : begin + block_bytes] = block  # first, because a copy waits less for memory than a sum
        digest.update(block.data)
    return digest.hexdigest()


def compare_checksums(sent: Mapping[str, str], arrived: Mapping[str, str], where: str) -> None:
    """Compare checksums of sent and arrived parameters. Raises `WeightSyncError` if a parameter is missing, unexpected
    or different; the message names each such parameter."""
    missing = [name for name in sent if name not in arrived]
    unexpected = [name for name in arrived if name not in sent]
    differing = [name for name in sent if name in arrived and sent[name] != arrived[name]]
    if not (missing or unexpected or differing):
        return
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (("did not arrive", missing), ("was not sent", unexpected), ("arrived changed", differing))
        if names
    ]
    raise WeightSyncError(
        f"weight update at {where} failed; {'; '.join(problems)}. The old version keeps serving.",
        parameters=missing + unexpected + differing,
    )


def verify_state(state: WeightState, version: int, sums: Mapping[str, str], where: str) -> None:
    """Compare the state that a replica reports with the weights that were sent.

    Parameters that the engine cannot read back are not compared: all if the report has no checksums, else `unread`.

    Raises:
        WeightSyncError: the version differs, or a parameter is not served as it was sent.
    """
    if state.version != version:
        raise WeightSyncError(f"{where} must serve weight version {version}, but reports version {state.version}")
    if not state.checksums:
        return
    unread = frozenset(state.unread)
    differing = [name for name, served in state.checksums.items() if name in sums and served != sums[name]]
    absent = [name for name in sums if name not in state.checksums and name not in unread]
    if differing or absent:
        wrong = differing + absent
        raise WeightSyncError(
            f"{where} received all of weight version {version}, but does not serve {listed(wrong)} as sent. "
            "So it is not allowed to answer requests.",
            parameters=wrong,
        )
