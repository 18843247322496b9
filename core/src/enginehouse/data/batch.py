"""`Batch`: the data that roles exchange. A batch has named columns, is immutable, and is cheap to split."""

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
    check_same_names,
    common_rows,
    describe_column,
    join_columns,
    memoize,
    part_sizes,
    row_index,
    same_column,
    share_offsets,
)
from enginehouse.data.errors import BatchError, UnknownColumnError
from enginehouse.data.ragged import Ragged, Selection
from enginehouse.errors import nearest


class Batch:
    """Named columns with the same number of rows.

    A column is a dense tensor `(rows, ...)` (numpy arrays are accepted), a `Ragged` (one sequence per row, no padding),
    or a tuple of Python objects (lists are accepted). A batch is immutable: operations return new batches that share
    memory with the old one if possible. Ragged columns with equal row lengths share one `offsets` tensor.

    Pickling sends each tensor as an out-of-band buffer (pickle 5), so a batch from Ray's object store is a view of the
    store. Device tensors arrive in host memory.

    Never write into a column in place; write into a `clone` of the batch. Other batches, and other processes that read
    the same object from the store, may share the column's memory, so they would see the change. Torch cannot prevent
    such a write, because it has no read-only tensors.

    >>> batch = Batch({"input_ids": Ragged.from_list([[1, 2], [3]]), "reward": torch.tensor([0.0, 1.0])})
    >>> batch["input_ids"][1], len(batch)
    (tensor([3]), 2)
    """

    __slots__ = ("_columns", "_rows")

    _columns: dict[str, Any]
    _rows: int

    __iter__ = None  # else Python would iterate by batch[0], batch[1], ...

    def __init__(self, columns: Mapping[str, Any]) -> None:
        """Check and store `columns`.

        Raises:
            BatchError: if row counts differ, or a tensor cannot be in a batch.
            TypeError: if a value is not a column.
        """
        checked = {name: as_column(name, value) for name, value in columns.items()}
        self._rows = common_rows(checked)
        self._columns = share_offsets(checked)

    @classmethod
    def _make(cls, columns: dict[str, Any], rows: int) -> Batch:
        """Return a batch that owns `columns`, without checks."""
        self = object.__new__(cls)
        self._columns = columns
        self._rows = rows
        return self

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def __getitem__(self, name: str) -> Any:
        """Return the column as it is stored: `Tensor`, `Ragged` or tuple.

        Raises:
            UnknownColumnError: if there is no such column. The message names the nearest one.
        """
        try:
            return self._columns[name]
        except KeyError:
            raise self._unknown(name) from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns in order."""
        return tuple(self._columns)

    def tensor(self, name: str) -> Tensor:
        """Return the dense column `name`.

        Raises:
            TypeError: if the column is not dense.
        """
        return self._of_kind(name, Tensor, "dense")

    def ragged(self, name: str) -> Ragged:
        """Return the ragged column `name`.

        Raises:
            TypeError: if the column is not ragged.
        """
        return self._of_kind(name, Ragged, "ragged")

    def objects(self, name: str) -> tuple[Any, ...]:
        """Return the object column `name`.

        Raises:
            TypeError: if the column does not hold objects.
        """
        return self._of_kind(name, tuple, "object")

    def row(self, index: int) -> dict[str, Any]:
        """Return the values of one row by column name. Tensors are views of the batch."""
        if not -self._rows <= index < self._rows:
            raise IndexError(f"row {index} is out of range: the batch has {self._rows} rows")
        return {name: column[index] for name, column in self._columns.items()}

    def lengths(self, column: str) -> Tensor:
        """Return the row lengths of a ragged column in tokens, int64 `(rows,)` in host memory."""
        return self.ragged(column).lengths

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes. Offsets that columns share count once; Python objects do not count."""
        offsets = {
            id(column.offsets): column.offsets for column in self._columns.values() if isinstance(column, Ragged)
        }
        values = [column.values if isinstance(column, Ragged) else column for column in self._columns.values()]
        return sum(tensor.nbytes for tensor in (*offsets.values(), *values) if isinstance(tensor, Tensor))

    def equal(self, other: Batch) -> bool:
        """Return True if both batches have the same column names, kinds, dtypes, row lengths and values.

        The order of the columns does not matter. NaN equals NaN.
        """
        return (
            self._rows == other._rows
            and self._columns.keys() == other._columns.keys()
            and all(same_column(column, other._columns[name]) for name, column in self._columns.items())
        )

    def __repr__(self) -> str:
        title = f"Batch of {self._rows} rows, {self.nbytes:,} bytes"
        width = max(map(len, self._columns), default=0)
        return "\n".join([title, *(f"  {name:{width}}  {describe_column(c)}" for name, c in self._columns.items())])

    def select(self, names: Iterable[str]) -> Batch:
        """Return a batch with only the columns `names`, in this order."""
        return Batch._make({name: self[name] for name in as_names(names)}, self._rows)

    def drop(self, names: Iterable[str]) -> Batch:
        """Return a batch with all columns except `names`."""
        dropped = set(as_names(names))
        for name in dropped:
            self[name]  # an unknown name is an error
        return Batch._make({name: c for name, c in self._columns.items() if name not in dropped}, self._rows)

    def with_columns(self, **columns: Any) -> Batch:
        """Add columns, or replace columns of the same name.

        Raises:
            BatchError: if a column does not have the row count of this batch.
        """
        added = {name: as_column(name, value) for name, value in columns.items()}
        merged = {**self._columns, **added}
        if not self._columns and not self._rows:
            return Batch._make(share_offsets(merged), common_rows(merged))
        for name, column in added.items():
            if len(column) != self._rows:
                raise BatchError(f"column {name!r} has {len(column)} rows, but the batch has {self._rows}")
        return Batch._make(share_offsets(merged), self._rows)

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Rename columns: `{old: new}`.

        Raises:
            BatchError: if two columns would get the same name.
        """
        for name in names:
            self[name]
        renamed = {names.get(name, name): column for name, column in self._columns.items()}
        if len(renamed) != len(self._columns):
            raise BatchError(
                f"renaming {dict(names)} gives two columns the same name. Columns: {', '.join(self._columns)}"
            )
        return Batch._make(renamed, self._rows)

    def slice(self, start: int, stop: int | None = None) -> Batch:
        """Return a view of rows `start` to `stop`. Negative and large numbers follow the rules of Python slices."""
        start, stop, _ = slice(start, stop).indices(self._rows)
        stop = max(start, stop)
        if stop - start == self._rows:
            return self
        plan = memoize(lambda offsets: ragged.plan_slice(offsets, start, stop))
        return self._select_rows(stop - start, plan, lambda column: column[start:stop])

    def take(self, rows: Sequence[int] | Tensor | np.ndarray) -> Batch:
        """Return the rows at the given indices, or the rows where a bool mask is True.

        Rows have the order of the indices, which may repeat. The result is a view if the rows are consecutive, else a
        copy.

        Raises:
            IndexError: if an index is outside the batch.
            BatchError: if the indices are not one-dimensional integers, or the mask has another length.
        """
        index = row_index(rows, self._rows)
        if len(index) and index[-1] - index[0] == len(index) - 1 and bool((np.diff(index) == 1).all()):
            return self.slice(int(index[0]), int(index[-1]) + 1)
        return self._gather(index)

    def repeat(self, n: int) -> Batch:
        """Return each row `n` times, with the copies of a row next to each other."""
        if n < 0:
            raise BatchError(f"rows cannot be repeated {n} times")
        return self if n == 1 else self._gather(np.repeat(np.arange(self._rows), n))

    def split(self, parts: int | Sequence[int]) -> list[Batch]:
        """Split into consecutive batches, which are views.

        Args:
            parts: size of each part, or the number of parts. In the second case, sizes differ by at most one, and the
                first parts are the larger ones. If there are fewer rows than parts, the last parts are empty.

        Raises:
            BatchError: if the number of parts is not positive, or the sizes do not add up to the number of rows.
        """
        sizes = part_sizes(self._rows, parts)
        ends = np.cumsum(sizes).tolist()
        return [self.slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return all rows of all batches in order. The columns must have equal names, kinds, dtypes and shapes.

        A batch without rows needs only equal names, because the kinds of its columns may be unknown.

        Raises:
            BatchError: if a column differs between batches (the message names it), or if `batches` is empty.
        """
        batches = list(batches)
        if not batches:
            raise BatchError("there is no batch to concatenate")
        first = batches[0]
        if len(batches) == 1:
            return first
        check_same_names([batch._columns for batch in batches])
        batches = [batch for batch in batches if len(batch)] or batches[:1]
        if len(batches) == 1:
            return batches[0].select(first.columns)
        first = batches[0].select(first.columns)
        joined: dict[tuple[int, ...], Tensor] = {}
        columns = {
            name: join_columns(name, [batch._columns[name] for batch in batches], joined) for name in first._columns
        }
        return Batch._make(columns, sum(batch._rows for batch in batches))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Move tensors to `device`. The offsets of ragged columns stay on the host."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """Copy all tensors. The copy is independent: it keeps no memory of a larger batch or of Ray's object store."""
        return self._map(torch.clone, memoize(torch.clone))

    def __copy__(self) -> Batch:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _read_batch, (wire.WIRE_VERSION, self._rows, *_write_columns(self._columns, protocol))

    def _gather(self, index: np.ndarray) -> Batch:
        def select(column: Any) -> Any:
            if isinstance(column, Tensor):
                return row_copies.gather(column, index)
            return tuple([column[row] for row in index.tolist()])

        return self._select_rows(len(index), memoize(lambda offsets: ragged.plan_take(offsets, index)), select)

    def _select_rows(self, rows: int, plan: Callable[[Tensor], Selection], select: Callable[[Any], Any]) -> Batch:
        """Select rows by `plan` from ragged columns, and by `select` from all others."""
        columns: dict[str, Any] = {}
        for name, column in self._columns.items():
            columns[name] = column._select(plan(column.offsets)) if isinstance(column, Ragged) else select(column)
        return Batch._make(columns, rows)

    def _map(
        self, change: Callable[[Tensor], Tensor], change_offsets: Callable[[Tensor], Tensor] | None = None
    ) -> Batch:
        """Apply `change` to all tensors except offsets, and `change_offsets`, if given, to offsets."""
        columns: dict[str, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, Ragged):
                offsets = change_offsets(column.offsets) if change_offsets else column.offsets
                columns[name] = Ragged._make(change(column.values), offsets)
            else:
                columns[name] = change(column) if isinstance(column, Tensor) else column
        return Batch._make(columns, self._rows)

    def _of_kind(self, name: str, kind: type, word: str) -> Any:
        column = self[name]
        if not isinstance(column, kind):
            raise TypeError(f"column {name!r} is {describe_column(column)}, not a {word} column")
        return column

    def _unknown(self, name: object) -> UnknownColumnError:
        if not isinstance(name, str):
            return UnknownColumnError(f"a batch must be indexed by column name, not {name!r}; see row, slice and take")
        return UnknownColumnError(f"the batch has no column {name!r}. {nearest(name, self._columns)}")


def _write_columns(
    columns: Mapping[str, Any], protocol: int
) -> tuple[list[tuple[str, Any, Any]], list[wire.WireTensor]]:
    """Return the layout of columns and the tensors that the layout refers to, for `_read_batch`."""
    tensors: list[wire.WireTensor] = []
    places: dict[int, int] = {}  # shared offsets are sent once, and the reader shares them
    layout: list[tuple[str, Any, Any]] = []
    for name, column in columns.items():
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
    return layout, tensors


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
