"""A score of each whole sequence by a model with a value head: what a reward model gives, on any engine.

An engine's `values[t]` is the head's output at the token before `t`. So the output at a row's last token, which is what
transformers' `...ForSequenceClassification` gives as its logit, is the value at a token more. Which token that is does
not matter: nothing is computed from it.
"""

from __future__ import annotations

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs

VALUES = Outputs(logprobs=False, values=True)
"""What an engine with a value head is asked for; of `with_end(batch)` one value a row is not 0."""


def with_end(batch: Batch) -> Batch:
    """The rows of a batch with a token more, and the `loss_mask` that marks it alone; no other columns.

    Args:
        batch: `input_ids`, at least one token a row.
    """
    ids = batch.ragged("input_ids")
    ends = ids.offsets[1:].numpy()
    values = ids.values.numpy()
    lengths = ids.lengths + 1
    longer = Ragged.from_lengths(torch.from_numpy(np.insert(values, ends, values[ends - 1])), lengths)
    mask = np.zeros(longer.tokens, dtype=bool)
    mask[longer.offsets[1:].numpy() - 1] = True
    return Batch({"input_ids": longer, "loss_mask": longer.like(torch.from_numpy(mask))})


def row_sums(column: Ragged) -> torch.Tensor:
    """One number a row, float64 `(rows,)`: the sum of what `forward` gave, which is 0 but where `loss_mask` is true.

    Args:
        column: `values` of `with_end(batch)`, or `logprobs`; no row is empty.
    """
    sums = np.add.reduceat(column.values.numpy(), column.offsets.numpy()[:-1], dtype=np.float64)
    return torch.from_numpy(sums)
