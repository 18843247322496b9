"""Batches whose rows stay in the processes' shared memory: the controller holds what it plans with, no more.

A worker's result is stored once, on its own node, by Ray's object store; processes there read it without a copy. The
controller knows each shard's row count, the lengths of its ragged columns and its columns of one number a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginehouse.controller.assembly import Assembly, Piece
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.shards import Shard, ShardFacts
from enginehouse.data import Batch, BatchError, UnknownColumnError
from enginehouse.data.column_kinds import as_names, describe_column, row_index
from enginehouse.errors import nearest

READ_SECONDS = 120.0
"""How long the controller waits for a shard to come to its node."""


class DistributedBatch:
    """A `Batch` whose rows are elsewhere: what a `dp` call returns where the workers return batches.

    Given to a call of any group, its rows go there from where they are. Operations on rows and columns give new
    distributed batches and move nothing. Immutable. The shards live as long as something refers to them, also when the
    group that made them is gone.

    Torch cannot make tensors of the object store read-only: never write into a column in place, everybody who has the
    batch would see it. `fetch().clone()` first.

    >>> batch = DistributedBatch.of([Batch({"reward": torch.tensor(part)}) for part in ([1.0, 0.0], [2.0])])
    >>> len(batch), batch.column("reward").mean()
    (3, tensor(1.))
    """

    __slots__ = ("_added", "_beside", "_names", "_rows", "_shards", "_starts")

    __iter__ = None

    def __init__(
        self,
        shards: Sequence[Shard],
        rows: np.ndarray,
        names: tuple[str, ...],
        added: Batch | None,
        beside: DistributedBatch | None = None,
    ) -> None:
        """Keep what is given; see `of` and `of_shards`.

        Args:
            shards: the shards.
            rows: row numbers over all shards end to end, int64.
            names: the columns.
            added: columns held here, in the order of `rows`.
            beside: further columns of the same rows, which lie in other shards; no name is in two places.
        """
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *(shard.facts.rows for shard in self._shards)])
        self._rows = rows
        self._names = names
        self._added = added
        self._beside = beside

    @classmethod
    def of_shards(cls, shards: Sequence[Shard], where: str = "a distributed batch") -> DistributedBatch:
        """All rows of `shards`, end to end.

        Raises:
            DispatchError: there is none, or their columns differ in name, kind, dtype or shape of an entry.
        """
        if not shards:
            raise DispatchError(f"{where}: there is no shard")
        names = tuple(shards[0].facts.kinds)
        for shard in shards:
            if shard.facts.kinds.keys() != set(names):
                raise DispatchError(
                    f"{where}: shards with different columns: {shards[0].origin} has {', '.join(names)}; "
                    f"{shard.origin} has {', '.join(shard.facts.kinds)}"
                )
        with_rows = [shard for shard in shards if shard.facts.rows]
        for shard in with_rows[1:]:
            for name in names:
                one, other = with_rows[0].facts.forms[name], shard.facts.forms[name]
                if one != other:
                    raise DispatchError(
                        f"{where}: column {name!r} is {one} from {with_rows[0].origin}, but {other} from {shard.origin}"
                    )
        return cls(with_rows or shards[:1], np.arange(sum(shard.facts.rows for shard in shards)), names, None)

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> DistributedBatch:
        """Batches of this process as shards.

        Raises:
            DispatchError: there is none, or their columns differ.
        """
        shards = [Shard(batch, ShardFacts.of(batch), f"batch {n} of this process") for n, batch in enumerate(batches)]
        return cls.of_shards(shards)

    # Looking

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return self._names

    def lengths(self, column: str) -> Tensor:
        """Lengths in tokens of a ragged column's rows, int64 `(rows,)`; nothing is read.

        Raises:
            TypeError: the column is of another kind.
        """
        self._known(column)
        if (other := self._elsewhere(column)) is not None:
            return other.lengths(column)
        if any(column not in shard.facts.lengths for shard in self._shards):
            raise TypeError(f"column {column!r} is {self._shards[0].facts.kinds[column]}, not a ragged column")
        lengths = np.concatenate([shard.facts.lengths[column] for shard in self._shards])
        return torch.from_numpy(lengths[self._rows])

    def column(self, name: str) -> Any:
        """One column: `Tensor`, `Ragged` or tuple.

        What the controller holds (columns of one number a row, columns added here) costs nothing; any other is read
        from the shards, see `fetch`.

        Raises:
            UnknownColumnError: naming the nearest column.
            DataLost: a shard is not there any more.
        """
        self._known(name)
        if (other := self._elsewhere(name)) is not None:
            return other[name]
        if not self._is_here(name):
            return self.fetch([name])[name]
        held = Batch.concat([shard.facts.numbers.select([name]) for shard in self._shards])
        return held.take(self._rows)[name]

    __getitem__ = column

    def is_objects(self, name: str) -> bool:
        """Whether a column is of Python objects; nothing is read."""
        self._known(name)
        if (other := self._elsewhere(name)) is not None:
            return isinstance(other[name], tuple) if isinstance(other, Batch) else other.is_objects(name)
        return self._shards[0].facts.forms[name] == "objects"

    def fetch(self, names: Iterable[str] | None = None) -> Batch:
        """Read the rows into this process, all columns or those named.

        A shard on this node is read in place: a batch of consecutive rows of one shard is a view, anything else is
        copied. One on another node travels to this node's store first, whole.

        Raises:
            UnknownColumnError: naming the nearest column.
            DataLost: a shard is not there any more, or did not come within `READ_SECONDS`.
        """
        chosen = self if names is None else self.select(names)
        if chosen.columns and all(map(chosen._is_here, chosen.columns)):
            return Batch({name: chosen.column(name) for name in chosen.columns})
        return chosen.assembly().read(READ_SECONDS)

    def shards(self) -> Iterator[Batch]:
        """The rows in order, in batches that each lie in one shard, read one at a time: views of the store.

        Raises:
            DataLost: as `fetch`.
        """
        of_shard = self._shard_of()
        cuts = np.flatnonzero(np.diff(of_shard)) + 1
        for start, stop in zip([0, *cuts], [*cuts, len(of_shard)]):
            yield self.slice(int(start), int(stop)).fetch()

    def __repr__(self) -> str:
        width = max(map(len, self._names), default=0)
        lines = [f"DistributedBatch of {len(self)} rows in {len(self._shards)} shard(s)"]
        for name in self._names:
            kind, of_all = self._described(name)
            lines.append(f"  {name:{width}}  {kind}{'' if of_all else ' (first shard)'}")
        return "\n".join(lines)

    def _described(self, name: str) -> tuple[str, bool]:
        """A column's kind in words, and whether it is said of all shards."""
        if self._added is not None and name in self._added:
            return describe_column(self._added[name]) + ", here", True
        if self._beside is not None and name in self._beside:
            return self._beside._described(name)
        return self._shards[0].facts.kinds[name], len(self._shards) == 1

    # Columns

    def select(self, names: Iterable[str]) -> DistributedBatch:
        """Only these columns, in this order."""
        chosen = tuple(as_names(names))
        for name in chosen:
            self._known(name)
        added = [name for name in chosen if self._added is not None and name in self._added]
        held = self._added.select(added) if self._added is not None and added else None
        elsewhere = [name for name in chosen if self._beside is not None and name in self._beside]
        beside = self._beside.select(elsewhere) if self._beside is not None and elsewhere else None
        return DistributedBatch(self._shards, self._rows, chosen, held, beside)

    def drop(self, names: Iterable[str]) -> DistributedBatch:
        """All columns but these."""
        dropped = set(as_names(names))
        for name in dropped:
            self._known(name)
        return self.select([name for name in self._names if name not in dropped])

    def with_columns(self, **columns: Any) -> DistributedBatch:
        """Add columns that are here, or replace some; they travel with the calls the batch is given to.

        Raises:
            BatchError: a column does not have this batch's row count.
        """
        given = Batch(columns)
        if columns and len(given) != len(self):
            raise BatchError(f"column(s) {', '.join(columns)} have {len(given)} rows, the batch has {len(self)}")
        before = {name: self._added[name] for name in self._added.columns} if self._added is not None else {}
        added = Batch({**before, **{name: given[name] for name in given.columns}})
        names = (*self._names, *(name for name in given.columns if name not in self._names))
        beside = self._beside
        if beside is not None:
            left = [name for name in beside.columns if name not in given]
            beside = beside.select(left) if left else None
        return DistributedBatch(self._shards, self._rows, names, added if added.columns else None, beside)

    def joined(self, other: DistributedBatch) -> DistributedBatch:
        """Add the columns of another batch of the same rows, or replace some; they stay where they are.

        Raises:
            BatchError: it does not have this batch's row count.
        """
        if len(other) != len(self):
            raise BatchError(f"column(s) {', '.join(other.columns)} have {len(other)} rows, the batch has {len(self)}")
        kept = self.drop([name for name in other.columns if name in self._names])
        beside = other if kept._beside is None else kept._beside.joined(other)
        return DistributedBatch(kept._shards, kept._rows, (*kept._names, *other._names), kept._added, beside)

    # Rows

    def take(self, rows: Sequence[int] | Tensor | np.ndarray) -> DistributedBatch:
        """The rows at these indices, in this order, repeats allowed; or those where a bool mask is true.

        Raises:
            IndexError: an index lies outside the batch.
        """
        index = row_index(rows, len(self))
        added = None if self._added is None else self._added.take(index)
        beside = None if self._beside is None else self._beside.take(index)
        return DistributedBatch(self._shards, self._rows[index], self._names, added, beside)._without_unused()

    def slice(self, start: int, stop: int | None = None) -> DistributedBatch:
        """Rows `start` to `stop`, with Python's rules for negative and large numbers."""
        first, last, _ = slice(start, stop).indices(len(self))
        if (first, last) == (0, len(self)):
            return self
        return self.take(np.arange(first, max(first, last)))

    def split(self, parts: int | Sequence[int]) -> list[DistributedBatch]:
        """Cut into consecutive batches, as `Batch.split`.

        Raises:
            BatchError: the number of parts is not positive, or the sizes do not add up to the number of rows.
        """
        rows = Batch({"row": np.arange(len(self))})
        return [self.take(part["row"]) for part in rows.split(parts)]

    @staticmethod
    def concat(batches: Sequence[DistributedBatch]) -> DistributedBatch:
        """All rows of all batches, in order.

        Raises:
            BatchError: there is none, or they differ in their columns or in which of them were added here or joined.
        """
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
                    f"distributed batches of different columns: {', '.join(first._names)} (added here: "
                    f"{', '.join(sorted(first._added_names())) or 'none'}) and {', '.join(batch._names)} (added here: "
                    f"{', '.join(sorted(batch._added_names())) or 'none'})"
                )
        shards = list({id(shard): shard for batch in batches for shard in batch._shards}.values())  # each is read once
        starts = dict(zip(map(id, shards), np.cumsum([0, *(shard.facts.rows for shard in shards)])))
        rows = np.concatenate([batch._rows + batch._moved_to(starts) for batch in batches])
        added = (
            None
            if first._added is None
            else Batch.concat([batch._added for batch in batches if batch._added is not None])
        )
        besides = [batch._beside for batch in batches if batch._beside is not None]
        beside = DistributedBatch.concat(besides) if besides else None
        return DistributedBatch(shards, rows, first._names, added, beside)

    # Inside

    def assembly(self) -> Assembly:
        """What another process needs to read this batch."""
        of_shard = self._shard_of()
        order = np.argsort(of_shard, kind="stable")
        sorted_rows, sorted_shard = self._rows[order], of_shard[order]
        made = []
        for number in np.unique(sorted_shard) if len(order) else [0]:
            shard = self._shards[number]
            local = sorted_rows[sorted_shard == number] - self._starts[number]
            made.append(self._piece(shard, local))
        in_order = bool((order == np.arange(len(order))).all())
        beside = None if self._beside is None else self._beside.assembly()
        return Assembly(tuple(made), None if in_order else np.argsort(order), self._names, self._added, beside)

    def _piece(self, shard: Shard, rows: np.ndarray) -> Piece:
        """Some rows of a shard, as briefly as they can be told."""
        if isinstance(shard.place, Batch):  # it would travel whole, with all its columns
            stored = [name for name in self._names if name not in self._added_names() | self._beside_names()]
            return Piece(shard.place.select(stored).take(rows), shard.origin, None)
        if not len(rows) or (rows == np.arange(rows[0], rows[0] + len(rows))).all():
            start = int(rows[0]) if len(rows) else 0
            if len(rows) == shard.facts.rows:
                return Piece(shard.place, shard.origin, None)
            return Piece(shard.place, shard.origin, slice(start, start + len(rows)))
        return Piece(shard.place, shard.origin, rows)

    def _shard_of(self) -> np.ndarray:
        """The shard of each row."""
        return np.searchsorted(self._starts, self._rows, side="right") - 1

    def _moved_to(self, starts: Mapping[int, int]) -> np.ndarray:
        """By how much each row's number changes where the shards begin at other rows, by their identity."""
        moved = np.array([starts[id(shard)] - start for shard, start in zip(self._shards, self._starts)])
        return moved[self._shard_of()]

    def _without_unused(self) -> DistributedBatch:
        """Let go of shards none of whose rows are left, so that their memory can be given back."""
        used, which = np.unique(self._shard_of(), return_inverse=True)
        if len(used) == len(self._shards):
            return self
        shards = [self._shards[number] for number in used] or self._shards[:1]  # one always says what the columns are
        starts = np.cumsum([0, *(shard.facts.rows for shard in shards)])
        rows = self._rows - self._starts[used][which] + starts[which] if len(used) else self._rows
        return DistributedBatch(shards, rows, self._names, self._added, self._beside)

    def _added_names(self) -> set[str]:
        return set(self._added.columns) if self._added is not None else set()

    def _beside_names(self) -> set[str]:
        return set(self._beside.columns) if self._beside is not None else set()

    def _elsewhere(self, name: str) -> Batch | DistributedBatch | None:
        """What has a column that is not in these shards."""
        if self._added is not None and name in self._added:
            return self._added
        return self._beside if self._beside is not None and name in self._beside else None

    def _is_here(self, name: str) -> bool:
        """Whether a column is held here."""
        if (other := self._elsewhere(name)) is not None:
            return isinstance(other, Batch) or other._is_here(name)
        return all(name in shard.facts.numbers for shard in self._shards)

    def _known(self, name: str) -> None:
        if name not in self._names:
            raise UnknownColumnError(f"the batch has no column {name!r}: {nearest(name, self._names)}")

    def __reduce__(self) -> Any:
        raise DispatchError(
            "a DistributedBatch is given to a group's call as an argument of its own, not inside another object; "
            "fetch() reads it"
        )
