"""Computes and compares checksums of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from enginehouse.engines.weights import WeightState, WeightSyncError
from enginehouse.errors import listed

if TYPE_CHECKING:
    import torch

CACHED_BYTES = 2 << 20
"""Block size: small enough to stay in the processor's cache after a read, and large enough for a fast loop."""


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes, without shape and dtype: XXH3, 64 bits, in hexadecimal."""
    import torch
    import xxhash

    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def copy_with_checksum(source: torch.Tensor, target: torch.Tensor, block_bytes: int = CACHED_BYTES) -> str:
    """Copy a tensor to a contiguous tensor of the same shape and dtype, both in host memory, and return its `checksum`.

    This is faster than a copy and then a checksum, because each block is copied while it is in the processor's cache.
    """
    import torch
    import xxhash

    read = source.detach().reshape(-1).view(torch.uint8)
    written = target.view(-1).view(torch.uint8)
    digest = xxhash.xxh3_64()
    for begin in range(0, len(read), block_bytes):
        block = read[begin : begin + block_bytes]
        digest.update(block.numpy().data)
        written[begin : begin + block_bytes].copy_(block)
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
