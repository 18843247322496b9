"""`Batch`: what roles hand each other. Named columns of one row count, immutable, cheap to cut and to send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginehouse.data import ragged, row_copies, wire
from enginehouse.data.column_kinds import (
    as_column,
    as_names,
    common_rows,
    describe_column,
    join_columns,
    memoize,
    row_index,
    same_column,
    share_offsets,
)
from enginehouse.data.errors import BatchError, UnknownColumnError
from enginehouse.data.ragged import Ragged
from enginehouse.errors import nearest


class Batch:
    """Named columns of one row count.

    A column is a dense tensor `(rows, ...)` (numpy arrays are taken too), a `Ragged` (one sequence a row, no
    padding) or a tuple of Python objects (given as a list or tuple). A batch is immutable: operations return
    new batches that share memory with the old one where they can. Never write into a column in place: torch knows
    no read-only tensors, and what was read from the object store would change for everybody (`clone` first).
    Ragged columns with the same row lengths share one `offsets` tensor.

    Pickling sends each tensor as an out-of-band buffer (pickle 5): a batch read from Ray's object store is a view
    of the store. Tensors on a device arrive in host memory.

    >>> batch = Batch({"input_ids": Ragged.from_list([[1, 2], [3]]), "reward": torch.tensor([0.0, 1.0])})
    >>> batch["input_ids"][1], len(batch)
    (tensor([3]), 2)
    """

    __slots__ = ("_columns", "_rows")

    _columns: dict[str, Any]
    _rows: int

    __iter__ = None  # without this Python would try batch[0], batch[1], ...

    def __init__(self, columns: Mapping[str, Any]) -> None:
        """Check and keep `columns`.

        Raises:
            BatchError: if row counts differ or a tensor cannot be held.
            TypeError: if something is no column.
        """
        held = {name: as_column(name, value) for name, value in columns.items()}
        self._rows = common_rows(held)
        self._columns = share_offsets(held)

    @classmethod
    def _make(cls, columns: dict[str, Any], rows: int) -> Batch:
        """Skip all checks; `columns` is kept."""
        self = object.__new__(cls)
        self._columns = columns
        self._rows = rows
        return self

    # Looking

    def __len__(self) -> int:
        """Number of rows."""
        return self._rows

    def __getitem__(self, name: str) -> Any:
        """The column as it is held: `Tensor`, `Ragged` or tuple.

        Raises:
            UnknownColumnError: naming the nearest column.
        """
        try:
            return self._columns[name]
        except KeyError:
            raise self._unknown(name) from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self._columns)

    def tensor(self, name: str) -> Tensor:
        """The dense column `name`.

        Raises:
            TypeError: if it is of another kind.
        """
        return self._of_kind(name, Tensor, "dense")

    def ragged(self, name: str) -> Ragged:
        """The ragged column `name`.

        Raises:
            TypeError: if it is of another kind.
        """
        return self._of_kind(name, Ragged, "ragged")

    def objects(self, name: str) -> tuple[Any, ...]:
        """The object column `name`.

        Raises:
            TypeError: if it is of another kind.
        """
        return self._of_kind(name, tuple, "object")

    def row(self, index: int) -> dict[str, Any]:
        """One row, by column name: tensors are views."""
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} of a batch with {self._rows} rows")
        return {name: column[index] for name, column in self._columns.items()}

    def lengths(self, column: str) -> Tensor:
        """Lengths in tokens of a ragged column's rows, int64 `(rows,)` in host memory."""
        return self.ragged(column).lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; offsets shared by several columns count once. Python objects are not counted."""
        total = 0
        seen = set()
        for column in self._columns.values():
            if isinstance(column, Ragged):
                total += column.values.nbytes + (0 if id(column.offsets) in seen else column.offsets.nbytes)
                seen.add(id(column.offsets))
            elif isinstance(column, Tensor):
                total += column.nbytes
        return total

    def equal(self, other: Batch) -> bool:
        """Whether both have the same columns (in any order), kinds, dtypes, row lengths and values (NaN equals NaN)."""
        return (
            self._rows == other._rows
            and self._columns.keys() == other._columns.keys()
            and all(same_column(column, other._columns[name]) for name, column in self._columns.items())
        )

    def __repr__(self) -> str:
        title = f"Batch of {self._rows} rows, {self.nbytes:,} bytes"
        width = max(map(len, self._columns), default=0)
        return "\n".join([title, *(f"  {name:{width}}  {describe_column(c)}" for name, c in self._columns.items())])

    # Columns

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns, in this order."""
        return Batch._make({name: self[name] for name in as_names(names)}, self._rows)

    def drop(self, names: Iterable[str]) -> Batch:
        """All columns but these."""
        dropped = set(as_names(names))
        for name in dropped:
            self[name]  # an unknown name is an error
        return Batch._make({name: c for name, c in self._columns.items() if name not in dropped}, self._rows)

    def with_columns(self, **columns: Any) -> Batch:
        """Add columns, or replace those of the same name.

        Raises:
            BatchError: if a column does not have this batch's row count.
        """
        added = {name: as_column(name, value) for name, value in columns.items()}
        merged = {**self._columns, **added}
        if not self._columns and not self._rows:
            return Batch._make(share_offsets(merged), common_rows(merged))
        for name, column in added.items():
            if len(column) != self._rows:
                raise BatchError(f"column {name!r} has {len(column)} rows, the batch has {self._rows}")
        return Batch._make(share_offsets(merged), self._rows)

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Give columns other names: `{old: new}`."""
        for name in names:
            self[name]
        renamed = {names.get(name, name): column for name, column in self._columns.items()}
        if len(renamed) != len(self._columns):
            raise BatchError(f"renaming {dict(names)} gives two columns of {', '.join(self._columns)} the same name")
        return Batch._make(renamed, self._rows)

    # Rows

    def slice(self, start: int, stop: int | None = None) -> Batch:
        """Rows `start` to `stop`, with Python's rules for negative and large numbers. A view."""
        start, stop, _ = slice(start, stop).indices(self._rows)
        stop = max(start, stop)
        if stop - start == self._rows:
            return self
        plan = memoize(lambda offsets: ragged.slice_offsets(offsets, start, stop))
        columns: dict[str, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                first, last, offsets = plan(column.offsets)
                columns[name] = Ragged._make(column.values[first:last], offsets)
            else:
                columns[name] = column[start:stop]
        return Batch._make(columns, stop - start)

    def take(self, rows: Sequence[int] | Tensor | np.ndarray) -> Batch:
        """The rows at these indices, in this order, repeats allowed; or those where a bool mask is true.

        Consecutive rows give a view, anything else a copy.

        Raises:
            IndexError: if an index lies outside the batch.
            BatchError: if the indices are not one-dimensional integers, or the mask has another length.
        """
        index = row_index(rows, self._rows)
        if len(index) and index[-1] - index[0] == len(index) - 1 and bool((np.diff(index) == 1).all()):
            return self.slice(int(index[0]), int(index[-1]) + 1)
        return self._gather(index)

    def repeat(self, n: int) -> Batch:
        """Each row `n` times, the copies of a row next to each other."""
        if n < 0:
            raise BatchError(f"rows cannot be repeated {n} times")
        return self if n == 1 else self._gather(np.repeat(np.arange(self._rows), n))

    def split(self, parts: int | Sequence[int]) -> list[Batch]:
        """Cut into consecutive batches, views all.

        Args:
            parts: a number of parts, whose sizes differ by at most one (the first are the larger ones; some are
                empty where there are fewer rows than parts); or the sizes themselves.

        Raises:
            BatchError: if the number of parts is not positive or the sizes do not add up to the number of rows.
        """
        if isinstance(parts, int):
            if parts < 1:
                raise BatchError(f"a batch cannot be split into {parts} parts")
            size, larger = divmod(self._rows, parts)
            sizes = [size + 1] * larger + [size] * (parts - larger)
        else:
            sizes = [int(size) for size in parts]
            if sum(sizes) != self._rows or min(sizes, default=0) < 0:
                raise BatchError(f"sizes {sizes} do not add up to the batch's {self._rows} rows")
        ends = np.cumsum(sizes).tolist()
        return [self.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """All rows of all batches, in order. The columns must agree in names, kinds, dtypes and shapes.

        Batches without rows must agree in names alone: nobody can know what they would hold.

        Raises:
            BatchError: naming the column that differs; or if there is no batch.
        """
        batches = list(batches)
        if not batches:
            raise BatchError("there is no batch to concatenate")
        first = batches[0]
        if len(batches) == 1:
            return first
        for number, batch in enumerate(batches):
            if batch._columns.keys() != first._columns.keys():
                raise BatchError(
                    f"batches to concatenate have different columns: batch 0 has {', '.join(first._columns)}; "
                    f"batch {number} has {', '.join(batch._columns)}"
                )
        batches = [batch for batch in batches if len(batch)] or batches[:1]
        if len(batches) == 1:
            return batches[0].select(first.columns)
        first = batches[0].select(first.columns)
        joined: dict[tuple[int, ...], Tensor] = {}
        columns = {
            name: join_columns(name, [batch._columns[name] for batch in batches], joined) for name in first._columns
        }
        return Batch._make(columns, sum(batch._rows for batch in batches))

    # Memory

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Tensors on `device`; offsets of ragged columns stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """A batch with memory of its own: lets go of the object store, or of the large batch it was cut from."""
        copies = memoize(torch.clone)
        return Batch._make(
            {
                name: Ragged._make(column.values.clone(), copies(column.offsets))
                if isinstance(column, Ragged)
                else column.clone()
                if isinstance(column, Tensor)
                else column
                for name, column in self._columns.items()
            },
            self._rows,
        )

    def __copy__(self) -> Batch:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensors: list[wire.WireTensor] = []
        places: dict[int, int] = {}  # offsets shared by columns are sent once, and shared again by the reader
        layout: list[tuple[str, Any, Any]] = []
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                offsets = column.offsets
                place = places.get(id(offsets))
                if place is None:
                    place = places[id(offsets)] = len(tensors)
                    tensors.append(wire.write_tensor(offsets, protocol))
                layout.append((name, len(tensors), place))
                tensors.append(wire.write_tensor(column.values, protocol))
            elif isinstance(column, Tensor):
                layout.append((name, len(tensors), None))
                tensors.append(wire.write_tensor(column, protocol))
            else:
                layout.append((name, None, column))
        return _read_batch, (wire.WIRE_VERSION, self._rows, layout, tensors)

    # Inside

    def _gather(self, index: np.ndarray) -> Batch:
        plan = memoize(lambda offsets: ragged.plan_take(offsets, index))
        columns: dict[str, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                gather, offsets = plan(column.offsets)
                columns[name] = Ragged._make(gather(column.values), offsets)
            elif isinstance(column, Tensor):
                columns[name] = row_copies.gather(column, index)
            else:
                columns[name] = tuple([column[row] for row in index.tolist()])
        return Batch._make(columns, len(index))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        columns = {
            name: Ragged._make(change(column.values), column.offsets)
            if isinstance(column, Ragged)
            else change(column)
            if isinstance(column, Tensor)
            else column
            for name, column in self._columns.items()
        }
        return Batch._make(columns, self._rows)

    def _of_kind(self, name: str, kind: type, wanted: str) -> Any:
        column = self[name]
        if not isinstance(column, kind):
            raise TypeError(f"column {name!r} is {describe_column(column)}, not a {wanted} column")
        return column

    def _unknown(self, name: object) -> UnknownColumnError:
        if not isinstance(name, str):
            return UnknownColumnError(f"a batch is indexed by column name, not {name!r}; see row, slice and take")
        return UnknownColumnError(f"the batch has no column {name!r}: {nearest(name, self._columns)}")


def _read_batch(version: int, rows: int, layout: list[tuple[str, Any, Any]], parts: list[wire.WireTensor]) -> Batch:
    wire.check_version(version)
    tensors = [wire.read_tensor(part) for part in parts]
    columns: dict[str, Any] = {}
    for name, place, extra in layout:
        if place is None:
            columns[name] = extra
        elif extra is None:
            columns[name] = tensors[place]
        else:
            columns[name] = Ragged._make(tensors[place], tensors[extra])
    return Batch._make(columns, rows)
