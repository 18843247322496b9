"""The end of a connection at a training rank that sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from enginehouse.engines.weights import WeightChunk

if TYPE_CHECKING:
    import torch


class IdleSender:
    """Takes part in gathering each parameter, and drops it."""

    def send(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], deadline_seconds: float
    ) -> dict[str, str]:
        """Exhaust `weights`; no checksums, as nothing left."""
        for _ in weights:
            pass
        return {}

    def recv(self, version: int, deadline_seconds: float) -> Iterator[WeightChunk]:
        """Not for a sender's end."""
        raise TypeError("a training rank does not receive weights")

    def abort(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
