"""Assigns rows to mini-batches on the controller, so that the assignment does not depend on the number of ranks."""

from __future__ import annotations

import numpy as np
import torch


def assign_minibatches(rows: int, minibatches: int, epochs: int, seed: int) -> torch.Tensor:
    """Assign rows to mini-batches at random, differently in each pass and as evenly as possible.

    Args:
        seed: A number of any size, at least 0; all its bits are used.

    Returns:
        int64 `(rows, epochs)`, each entry in `range(minibatches)`.
    """
    generator = np.random.default_rng(seed)  # torch's generator takes only the lower 32 bits of a seed
    dealt = torch.empty(rows, epochs, dtype=torch.int64)
    for epoch in range(epochs):
        dealt[generator.permutation(rows), epoch] = torch.arange(rows) * minibatches // max(rows, 1)
    return dealt
