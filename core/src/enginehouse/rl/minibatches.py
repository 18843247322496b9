"""Which optimizer step of a pass each row takes part in, drawn once for the whole batch.

Drawn on the controller, so that a mini-batch has the same rows however many ranks share the work.
"""

from __future__ import annotations

import torch


def assign_minibatches(rows: int, minibatches: int, epochs: int, seed: int) -> torch.Tensor:
    """Deal rows to mini-batches, anew for each pass, as evenly as they go.

    Returns:
        int64 `(rows, epochs)`, each entry in `range(minibatches)`.
    """
    generator = torch.Generator().manual_seed(seed)
    dealt = torch.empty(rows, epochs, dtype=torch.int64)
    for epoch in range(epochs):
        order = torch.randperm(rows, generator=generator)
        dealt[order, epoch] = torch.arange(rows) * minibatches // max(rows, 1)
    return dealt
