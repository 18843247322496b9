"""Scores whole sequences with a value head, as a reward model does, on any engine.

An engine's `values[t]` is the head's output at the token before `t`. So the output at a row's last token is the value
at one additional token. This output is the logit of transformers' `...ForSequenceClassification`. Any additional token
will do, because no result depends on it.
"""

from __future__ import annotations

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs

VALUES = Outputs(logprobs=False, values=True)
"""Outputs to request from an engine with a value head. For `append_end(batch)`, the values are 0 except at the token
that was appended to each row."""


def append_end(batch: Batch) -> Batch:
    """Return the rows of a batch with one additional token, and a `loss_mask` that marks only that token.

    Args:
        batch: has `input_ids`, with at least one token per row.
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
    """Return each row's sum, float64 `(rows,)`, of outputs that are 0 where `loss_mask` is False.

    Args:
        column: `values` of `append_end(batch)`, or `logprobs`; no row is empty.
    """
    sums = np.add.reduceat(column.values.numpy(), column.offsets.numpy()[:-1], dtype=np.float64)
    return torch.from_numpy(sums)
