"""Rows of a batch end to end, without padding between them: the input of a micro-batch, and where its results belong.

Decides and indexes in numpy; knows nothing of models. A row ends before its last token, from which nothing is
predicted, and only positions that predict a needed token get logits (`enginehouse_torch.modeling.packing` does the
same for rows side by side).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginehouse.data import plan_microbatches
from enginehouse_torch.modeling.packing import Indices, Rows

NOTHING: Indices = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """The rows of a micro-batch, end to end.

    Attributes:
        rows: the batch's rows, ascending; None: of no rows, run for the other ranks' sake alone.
        lengths: lengths of the sequences, in tokens; one of padding at the end where the sum would not divide.
        tokens: index into the batch's flat tokens for each input position; -1 for padding.
        predictor: for each needed token, the input position whose output predicts it.
        needed: for each needed token, its index in the batch's flat tokens; ascending within a row.
    """

    rows: Indices | None
    lengths: tuple[int, ...]
    tokens: Indices
    predictor: Indices
    needed: Indices


def pack(rows: Rows, chosen: Sequence[int], members: Indices | None, *, each: int, whole: int) -> Packed:
    """Lay rows end to end.

    Args:
        rows: the batch's rows.
        chosen: those with a needed token that are computed; none: one sequence of padding.
        members: the micro-batch's rows, ascending, with those that only the loss may count.
        each: every sequence is padded to a multiple of so many tokens.
        whole: the sum is padded to a multiple of so many tokens; itself a multiple of `each`.
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
    if rest := -at % whole or (0 if at else whole):
        lengths.append(rest)
        tokens.append(np.full(rest, -1))
    return Packed(members, tuple(lengths), np.concatenate(tokens), np.concatenate(predictor), np.concatenate(needed))


def plan(rows: Rows, budget: int, *, each: int, whole: int) -> list[Packed]:
    """Cut a batch into micro-batches of at most `budget` tokens, a longer row excepted; none where it has no rows."""
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


def nothing(whole: int) -> Packed:
    """A micro-batch of no rows: padding alone."""
    return Packed(None, (whole,), np.full(whole, -1), NOTHING, NOTHING)
