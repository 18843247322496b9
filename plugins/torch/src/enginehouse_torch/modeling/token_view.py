"""Converts a batch to an engine's token ids, and the engine's outputs to the view that a loss gets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs, TokenView

COLUMNS = ("logprobs", "entropy", "values")
"""Names of all per-token outputs."""


def token_ids(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the batch's token ids end to end, on the host."""
    return batch.ragged("input_ids").values.cpu().numpy().astype(np.int64, copy=False)


def token_view(
    batch: Batch,
    rows: npt.NDArray[np.int64] | None,
    needed: npt.NDArray[np.int64] | None,
    found: Mapping[str, torch.Tensor],
    outputs: Outputs,
    device: torch.device,
) -> TokenView:
    """Return the loss's view of a micro-batch: its rows' columns, and the outputs spread over all their tokens.

    Args:
        batch: the whole batch.
        rows: the micro-batch's rows, ascending; None: all.
        needed: for each result, the index of its token in the batch's flat tokens; None: no results.
        found: the results, float32 `(tokens,)` with a gradient, one column for each of `outputs`.
        outputs: the requested outputs, 0 for tokens that are not needed.
        device: device of the view.
    """

    def to_device(column: torch.Tensor) -> torch.Tensor:
        return column.to(device, non_blocking=True)

    offsets = batch.ragged("input_ids").offsets
    if rows is not None:
        batch = batch.take(rows)
        whole, offsets = offsets.numpy(), batch.ragged("input_ids").offsets
        if needed is not None:
            row = np.searchsorted(whole, needed, side="right") - 1
            needed = needed - whole[row] + offsets.numpy()[np.searchsorted(rows, row)]
    tokens = int(offsets[-1])
    spread: dict[str, torch.Tensor] = {}
    for name in COLUMNS:
        if getattr(outputs, name):
            spread[name] = torch.zeros(tokens, device=device)
            if needed is not None:
                spread[name] = spread[name].index_copy(0, to_device(torch.from_numpy(needed)), found[name])
    columns: dict[str, torch.Tensor] = {}
    for name in batch.columns:
        column = batch[name]
        if isinstance(column, Ragged):
            if column.offsets is offsets or torch.equal(column.offsets, offsets):
                columns[name] = to_device(column.values)
        elif isinstance(column, torch.Tensor):
            columns[name] = to_device(column)
    row_of = torch.repeat_interleave(torch.arange(len(batch)), offsets.diff(), output_size=tokens)
    counted = None
    if "loss_mask" in columns:  # on the host, because a device would have to be waited for
        counted = to_device(batch.ragged("loss_mask").values.nonzero().squeeze(-1))
    return TokenView(spread, columns, to_device(row_of), len(batch), counted)
