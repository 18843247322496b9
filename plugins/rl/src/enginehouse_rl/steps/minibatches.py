"""Which optimizer step of a pass each row takes part in, drawn once for the whole batch.

Drawn on the controller, so that a mini-batch has the same rows however many ranks share the work.
"""

from __future__ import annotations

import numpy as np
import torch


def assign_minibatches(rows: int, minibatches: int, epochs: int, seed: int) -> torch.Tensor:
    """Deal rows to mini-batches, anew for each pass, as evenly as they go.

    Args:
        rows: how many there are.
        minibatches: of a pass.
        epochs: passes.
        seed: at least 0, of any size; all its bits count.

    Returns:
        int64 `(rows, epochs)`, each entry in `range(minibatches)`.
    """
    generator = np.random.default_rng(seed)  # torch's own takes the lower 32 bits of a seed
    dealt = torch.empty(rows, epochs, dtype=torch.int64)
    for epoch in range(epochs):
        dealt[generator.permutation(rows), epoch] = torch.arange(rows) * minibatches // max(rows, 1)
    return dealt
