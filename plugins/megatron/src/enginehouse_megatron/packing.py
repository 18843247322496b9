"""Lays rows of a batch end to end as the input of a micro-batch, and finds the places of the results.

It works in numpy and knows nothing of models. A row ends before its last token, which predicts nothing, and
only positions that predict a needed token get logits. `enginehouse_torch.modeling.packing` lays rows side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginehouse.data import plan_microbatches
from enginehouse_torch.modeling.packing import BatchRows, Indices

NOTHING: Indices = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of a micro-batch, end to end.

    Attributes:
        rows: Indices of the batch's rows, ascending; None if this rank runs only because other ranks run.
        lengths: Lengths of the sequences in tokens, perhaps with a sequence of padding at the end.
        tokens: Index into the batch's flat tokens for each input position; -1 for padding.
        predictor: For each needed token, the input position whose output predicts it.
        needed: For each needed token, its index in the batch's flat tokens; ascending within a row.
    """

    rows: Indices | None
    lengths: tuple[int, ...]
    tokens: Indices
    predictor: Indices
    needed: Indices


def pack(rows: BatchRows, chosen: Sequence[int], members: Indices | None, *, each: int, whole: int) -> Packed:
    """Lay rows end to end.

    Args:
        rows: The batch's rows.
        chosen: Rows to compute, each with a needed token; if there are none, the result is one sequence of padding.
        members: The micro-batch's rows, ascending, including those that only the loss may count.
        each: The length of every sequence becomes a multiple of this number of tokens.
        whole: The sum of all lengths becomes a multiple of this number, which is a multiple of `each`.
    """
    lengths, tokens, predictor, needed = [], [], [NOTHING], [NOTHING]
    at = 0
    for row in chosen:
        start, end = int(rows.starts[row]), int(rows.ends[row])
        length = -(-end // each) * each
        tokens.append(np.concatenate([np.arange(start, start + end), np.full(length - end, -1)]))
        own = rows.needed[slice(*np.searchsorted(rows.needed_rows, (row, row + 1)))]
        predictor.append(own - start - 1 + at)
        needed.append(own)
        lengths.append(length)
        at += length
    if padding := -at % whole or (0 if at else whole):
        lengths.append(padding)
        tokens.append(np.full(padding, -1))
    return Packed(members, tuple(lengths), np.concatenate(tokens), np.concatenate(predictor), np.concatenate(needed))


def plan(rows: BatchRows, budget: int, *, each: int, whole: int) -> list[Packed]:
    """Cut a batch into micro-batches of at most `budget` tokens, unless a row is longer; none if it has no rows."""
    if not len(rows.starts):
        return []
    present = np.flatnonzero(rows.ends)
    idle = np.flatnonzero(rows.ends == 0)  # nothing to compute, but the loss may count them
    groups = plan_microbatches([-(-int(rows.ends[row]) // each) * each for row in present], budget, padded=False)
    packed = []
    for number, group in enumerate(groups or [[]]):
        chosen = np.sort(present[group])
        members = np.sort(np.concatenate([chosen, idle])) if number == 0 else chosen
        packed.append(pack(rows, chosen.tolist(), members.astype(np.int64), each=each, whole=whole))
    return packed


def make_padding(whole: int) -> Packed:
    """Return a micro-batch without rows: only padding."""
    return Packed(None, (whole,), np.full(whole, -1), NOTHING, NOTHING)
