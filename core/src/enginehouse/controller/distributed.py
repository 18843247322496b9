"""Batches whose rows stay in the workers' shared memory. The controller holds only the columns that it plans with.

Ray's object store keeps a worker's result once, on the worker's node, where processes read it without a copy. The
controller knows the row count of each shard, the lengths of its ragged columns, and its columns of one number per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginehouse.controller.assembly import Assembly
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.shard_rows import ShardRows, join_shards
from enginehouse.controller.shards import Shard, ShardFacts
from enginehouse.data import Batch, BatchError, UnknownColumnError
from enginehouse.data.column_kinds import as_names, describe_column, row_index
from enginehouse.errors import nearest

READ_SECONDS = 120.0
"""Time limit for a shard to arrive at the controller's node."""


class DistributedBatch:
    """A `Batch` whose rows stay on the workers. A `dp` call returns it if the workers return batches.

    A call that gets the batch reads its rows from the shards. Operations on rows and columns return new distributed
    batches and move no data. A distributed batch is immutable. Its shards exist as long as an object refers to them,
    even after the group that made them has ended.

    Torch cannot make tensors of the object store read-only. Never write into a column in place, because every holder of
    the batch would see the change. Write into `fetch().clone()` instead.

    >>> batch = DistributedBatch.of([Batch({"reward": torch.tensor(part)}) for part in ([1.0, 0.0], [2.0])])
    >>> len(batch), batch.column("reward").mean()
    (3, tensor(1.))
    """

    __slots__ = ("_added", "_beside", "_names", "_rows")

    __iter__ = None

    def __init__(
        self,
        rows: ShardRows,
        names: tuple[str, ...],
        added: Batch | None,
        beside: DistributedBatch | None = None,
    ) -> None:
        """Use `of` or `of_shards` instead.

        Args:
            added: columns that this process holds, in the order of `rows`.
            beside: further columns of the same rows, which are in other shards. No column is in two places.
        """
        self._rows = rows
        self._names = names
        self._added = added
        self._beside = beside

    @classmethod
    def of_shards(cls, shards: Sequence[Shard], where: str = "a distributed batch") -> DistributedBatch:
        """Make a batch of all rows of `shards`, concatenated. Raises `DispatchError` if there is no shard, or their
        columns differ in name, kind, dtype or shape of an entry."""
        return cls(join_shards(shards, where), tuple(shards[0].facts.kinds), None)

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> DistributedBatch:
        """Make a batch from local batches. Raises `DispatchError` if there is no batch, or their columns differ."""
        shards = [Shard(batch, ShardFacts.of(batch), f"batch {n} of this process") for n, batch in enumerate(batches)]
        return cls.of_shards(shards)

    def __len__(self) -> int:
        return len(self._rows.numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return self._names

    def lengths(self, column: str) -> Tensor:
        """Return the lengths in tokens of a ragged column's rows, int64 `(rows,)`, without reading the rows. Raises
        `TypeError` if the column is not ragged."""
        self._known(column)
        if (holder := self._elsewhere(column)) is not None:
            return holder.lengths(column)
        shards = self._rows.shards
        if any(column not in shard.facts.lengths for shard in shards):
            raise TypeError(f"column {column!r} is {shards[0].facts.kinds[column]}, not a ragged column")
        lengths = np.concatenate([shard.facts.lengths[column] for shard in shards])
        return torch.from_numpy(lengths[self._rows.numbers])

    def column(self, name: str) -> Any:
        """Return a column: `Tensor`, `Ragged` or tuple.

        A column of one number per row, or an added column, is already in this process. Any other column is read from
        the shards (see `fetch`).

        Raises:
            UnknownColumnError: the batch has no such column. The message names the nearest column.
            DataLost: a shard no longer exists.
        """
        self._known(name)
        if (holder := self._elsewhere(name)) is not None:
            return holder[name]
        if not self._is_here(name):
            return self.fetch([name])[name]
        numbers = Batch.concat([shard.facts.numbers.select([name]) for shard in self._rows.shards])
        return numbers.take(self._rows.numbers)[name]

    __getitem__ = column

    def is_objects(self, name: str) -> bool:
        """Return True if a column holds Python objects, without reading the column."""
        self._known(name)
        if (holder := self._elsewhere(name)) is not None:
            return isinstance(holder[name], tuple) if isinstance(holder, Batch) else holder.is_objects(name)
        return self._rows.shards[0].facts.forms[name] == "objects"

    def fetch(self, names: Iterable[str] | None = None) -> Batch:
        """Read the rows into this process. `names` selects columns; None reads all columns.

        A shard on this node is read in place: consecutive rows of a shard are a view, and other rows are copied. A
        shard on another node is first copied completely to this node's object store.

        Raises:
            UnknownColumnError: the batch has no such column. The message names the nearest column.
            DataLost: a shard no longer exists, or did not arrive within `READ_SECONDS`.
        """
        chosen = self if names is None else self.select(names)
        if chosen.columns and all(map(chosen._is_here, chosen.columns)):
            return Batch({name: chosen.column(name) for name in chosen.columns})
        return chosen.assembly().read(READ_SECONDS)

    def shards(self) -> Iterator[Batch]:
        """Yield the rows in order, in batches of rows from the same shard. Raises `DataLost` if a shard cannot be read,
        as in `fetch`."""
        of_shard = self._rows.shard_of()
        cuts = np.flatnonzero(np.diff(of_shard)) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(of_shard)]):
            yield self.slice(int(start), int(stop)).fetch()

    def __repr__(self) -> str:
        width = max(map(len, self._names), default=0)
        lines = [f"DistributedBatch of {len(self)} rows in {len(self._rows.shards)} shard(s)"]
        for name in self._names:
            kind, of_all = self._describe(name)
            lines.append(f"  {name:{width}}  {kind}{'' if of_all else ' (first shard)'}")
        return "\n".join(lines)

    def _describe(self, name: str) -> tuple[str, bool]:
        """Describe a column's kind. Also return True if the description holds for all shards."""
        if self._added is not None and name in self._added:
            return describe_column(self._added[name]) + ", here", True
        if self._beside is not None and name in self._beside:
            return self._beside._describe(name)
        return self._rows.shards[0].facts.kinds[name], len(self._rows.shards) == 1

    def select(self, names: Iterable[str]) -> DistributedBatch:
        """Return the batch with only these columns, in this order."""
        chosen = tuple(as_names(names))
        for name in chosen:
            self._known(name)
        added = [name for name in chosen if self._added is not None and name in self._added]
        held = self._added.select(added) if self._added is not None and added else None
        elsewhere = [name for name in chosen if self._beside is not None and name in self._beside]
        beside = self._beside.select(elsewhere) if self._beside is not None and elsewhere else None
        return DistributedBatch(self._rows, chosen, held, beside)

    def drop(self, names: Iterable[str]) -> DistributedBatch:
        """Return the batch without these columns."""
        dropped = set(as_names(names))
        for name in dropped:
            self._known(name)
        return self.select([name for name in self._names if name not in dropped])

    def with_columns(self, **columns: Any) -> DistributedBatch:
        """Add columns that this process holds, or replace columns of the same name. Each call that gets the batch also
        sends these columns. Raises `BatchError` if a column has another row count than the batch."""
        new = Batch(columns)
        if columns and len(new) != len(self):
            raise BatchError(f"column(s) {', '.join(columns)} have {len(new)} rows, but the batch has {len(self)}")
        before = {name: self._added[name] for name in self._added.columns} if self._added is not None else {}
        added = Batch({**before, **{name: new[name] for name in new.columns}})
        names = (*self._names, *(name for name in new.columns if name not in self._names))
        beside = self._beside
        if beside is not None:
            kept = [name for name in beside.columns if name not in new]
            beside = beside.select(kept) if kept else None
        return DistributedBatch(self._rows, names, added if added.columns else None, beside)

    def joined(self, other: DistributedBatch) -> DistributedBatch:
        """Add the columns of another batch with the same rows, or replace columns of the same name. The columns stay in
        their shards. Raises `BatchError` if the other batch has another row count."""
        if len(other) != len(self):
            raise BatchError(
                f"column(s) {', '.join(other.columns)} have {len(other)} rows, but the batch has {len(self)}"
            )
        base = self.drop([name for name in other.columns if name in self._names])
        beside = other if base._beside is None else base._beside.joined(other)
        return DistributedBatch(base._rows, (*base._names, *other._names), base._added, beside)

    def take(self, rows: Sequence[int] | Tensor | np.ndarray) -> DistributedBatch:
        """Return the rows at these indices, in this order and possibly repeated, or the rows where a bool mask is True.
        Raises `IndexError` if an index is outside the batch."""
        index = row_index(rows, len(self))
        added = None if self._added is None else self._added.take(index)
        beside = None if self._beside is None else self._beside.take(index)
        return DistributedBatch(self._rows.take(index), self._names, added, beside)

    def slice(self, start: int, stop: int | None = None) -> DistributedBatch:
        """Return rows `start` to `stop`. Negative and large numbers follow the rules of Python slices."""
        first, last, _ = slice(start, stop).indices(len(self))
        if (first, last) == (0, len(self)):
            return self
        return self.take(np.arange(first, max(first, last)))

    def split(self, parts: int | Sequence[int]) -> list[DistributedBatch]:
        """Split into consecutive batches, as `Batch.split` does. Raises `BatchError` if the number of parts is not
        positive, or if the sizes do not add up to the number of rows."""
        rows = Batch({"row": np.arange(len(self))})
        return [self.take(part["row"]) for part in rows.split(parts)]

    @staticmethod
    def concat(batches: Sequence[DistributedBatch]) -> DistributedBatch:
        """Return all rows of all batches, in order. Raises `BatchError` if there is no batch, or the batches differ in
        their stored, added or joined columns."""
        if not batches:
            raise BatchError("there is no batch to concatenate")
        first = batches[0]
        if len(batches) == 1:
            return first
        for batch in batches:
            if (
                set(batch._names) != set(first._names)
                or batch._added_names() != first._added_names()
                or batch._beside_names() != first._beside_names()
            ):
                raise BatchError(
                    "distributed batches to concatenate have different columns: "
                    f"{', '.join(first._names)} (added here: {', '.join(sorted(first._added_names())) or 'none'}) and "
                    f"{', '.join(batch._names)} (added here: {', '.join(sorted(batch._added_names())) or 'none'})"
                )
        rows = ShardRows.concat([batch._rows for batch in batches])
        added = [batch._added for batch in batches if batch._added is not None]
        besides = [batch._beside for batch in batches if batch._beside is not None]
        beside = DistributedBatch.concat(besides) if besides else None
        return DistributedBatch(rows, first._names, Batch.concat(added) if added else None, beside)

    def assembly(self) -> Assembly:
        """Return the list of pieces that another process reads to get this batch."""
        stored = [name for name in self._names if self._elsewhere(name) is None]
        pieces, order = self._rows.pieces(stored)
        beside = None if self._beside is None else self._beside.assembly()
        return Assembly(pieces, order, self._names, self._added, beside)

    def _added_names(self) -> set[str]:
        return set(self._added.columns) if self._added is not None else set()

    def _beside_names(self) -> set[str]:
        return set(self._beside.columns) if self._beside is not None else set()

    def _elsewhere(self, name: str) -> Batch | DistributedBatch | None:
        """Return the batch that holds an added or joined column; None for a column in these shards."""
        if self._added is not None and name in self._added:
            return self._added
        return self._beside if self._beside is not None and name in self._beside else None

    def _is_here(self, name: str) -> bool:
        if (holder := self._elsewhere(name)) is not None:
            return isinstance(holder, Batch) or holder._is_here(name)
        return all(name in shard.facts.numbers for shard in self._rows.shards)

    def _known(self, name: str) -> None:
        if name not in self._names:
            raise UnknownColumnError(f"the batch has no column {name!r}. {nearest(name, self._names)}")

    def __reduce__(self) -> Any:
        raise DispatchError(
            "a DistributedBatch must be a separate argument of a group's call, not a part of another object; "
            "fetch() reads its rows"
        )
