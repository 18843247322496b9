"""Batches that stay on a worker. The controller gets only the metadata that it needs for planning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from enginehouse.data import Batch


@dataclass(frozen=True, slots=True, eq=False)
class ShardFacts:
    """Metadata of a shard, which the controller has without reading the shard.

    Attributes:
        kinds: kind, dtype and shape of each column, as text.
        forms: the part of each kind that must be equal in all shards of a batch.
        numbers: the columns with one number per row.
        lengths: row lengths of each ragged column, int64 `(rows,)`.
    """

    rows: int
    kinds: dict[str, str]
    forms: dict[str, str]
    numbers: Batch
    lengths: dict[str, np.ndarray]

    @classmethod
    def of(cls, batch: Batch) -> ShardFacts:
        """Collect the metadata of a batch in the process that made the batch."""
        from torch import Tensor

        from enginehouse.data import Ragged
        from enginehouse.data.column_kinds import column_form, describe_column

        known: dict[int, np.ndarray] = {}
        lengths: dict[str, np.ndarray] = {}
        numbers: list[str] = []
        for name in batch.columns:
            column = batch[name]
            if isinstance(column, Ragged):
                key = id(column.offsets)  # columns of the same rows share offsets, and their lengths are sent once
                if key not in known:
                    known[key] = column.lengths.numpy()
                lengths[name] = known[key]
            elif isinstance(column, Tensor) and column.ndim == 1:
                numbers.append(name)
        kinds = {name: describe_column(batch[name]) for name in batch.columns}
        forms = {name: column_form(batch[name]) for name in batch.columns}
        return cls(len(batch), kinds, forms, batch.select(numbers), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One worker's result, which stays in the worker's process.

    Attributes:
        place: Ray's reference to the batch, or the batch itself if a group in this process made it.
        origin: role, rank, node and method that made the batch, for messages.
    """

    place: Any
    facts: ShardFacts
    origin: str


def keep_back(result: Any) -> tuple[Any, Batch | None]:
    """Split a result into the part that the controller gets and the batch that stays on the worker.

    A batch stays if it is the result, or the last item of a tuple. Its `ShardFacts` take its place in the first part.
    Any other result is returned unchanged, with None as the second part.
    """
    batch = get_last(result)
    module = sys.modules.get("enginehouse.data.batch")
    if module is None or not isinstance(batch, module.Batch):  # no batch exists if the module was never imported
        return result, None
    return replace_last(result, ShardFacts.of(batch)), batch


def replace_last(result: Any, value: Any) -> Any:
    """Return the result with another value in place of its batch."""
    return (*result[:-1], value) if isinstance(result, tuple) else value


def get_last(result: Any) -> Any:
    """Return the value in place of a batch: the last item of a tuple, or the result itself."""
    return result[-1] if isinstance(result, tuple) and result else result
