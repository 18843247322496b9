"""A ragged column: one sequence per row, concatenated and never padded."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from enginehouse.data import row_copies, wire
from enginehouse.data.errors import BatchError

LONG_ROW_TOKENS = 512
"""Mean length from which rows are copied as whole spans. For long rows, that is faster than copying by token, and it
needs no index per token."""

REDUCED_TOKENS = 2**20
"""Approximate number of values that `Ragged.reduced` processes at a time."""

Selection = tuple[Callable[[Tensor], Tensor], Tensor]
"""A selection of rows: a function that picks the values of these rows from all values of a column, and the offsets of
these rows within the picked values."""


class Ragged:
    """Sequences of different length, one per row.

    Attributes:
        values: `(tokens, ...)`, all rows end to end, on any device.
        offsets: int64 `(rows + 1,)`: row `i` is `values[offsets[i]:offsets[i + 1]]`. Always in host memory, so that
            slicing and planning do not wait for a device.

    A column is immutable: operations return new columns that share memory if possible. A column and the columns that
    its `like` returns share one `offsets` tensor, also after any operation on their batch.

    >>> column = Ragged.from_list([[5, 6, 7], [], [8]])
    >>> column[0]
    tensor([5, 6, 7])
    >>> column.lengths
    tensor([3, 0, 1])
    """

    __slots__ = ("offsets", "values")

    values: Tensor
    offsets: Tensor

    def __init__(self, values: Tensor | np.ndarray, offsets: Tensor | np.ndarray | Sequence[int]) -> None:
        """Check and store `values` and `offsets`.

        Raises:
            BatchError: if the offsets are not int64 numbers that start at 0, never fall, and end at `len(values)`.
        """
        if isinstance(values, np.ndarray):
            values = wire.view_array(values)
        if not isinstance(offsets, Tensor):
            offsets = torch.as_tensor(np.array(offsets, dtype=None if len(offsets) else np.int64))
        offsets = offsets.cpu()
        if values.ndim < 1:
            raise BatchError("the values of a ragged column have no token axis: expected shape (tokens, ...), got ()")
        wire.check_dtype(values, "the values of a ragged column")
        if offsets.dtype is not torch.int64 or offsets.ndim != 1 or not len(offsets):
            raise BatchError(
                f"the offsets of a ragged column must be int64 of shape (rows + 1,), got {offsets.dtype} "
                f"of shape {tuple(offsets.shape)}"
            )
        array = offsets.numpy()
        if array[0] != 0 or array[-1] != values.shape[0]:
            raise BatchError(
                f"the offsets of a ragged column must go from 0 to the number of its values, {values.shape[0]}, "
                f"but go from {array[0]} to {array[-1]}"
            )
        falls = np.flatnonzero(array[1:] < array[:-1])
        if len(falls):
            row = int(falls[0])
            raise BatchError(
                f"the offsets of a ragged column must not fall, but fall from {array[row]} to {array[row + 1]} "
                f"at row {row}"
            )
        self.values = values
        self.offsets = offsets

    @classmethod
    def _make(cls, values: Tensor, offsets: Tensor) -> Ragged:
        """Return a column without checks."""
        self = object.__new__(cls)
        self.values = values
        self.offsets = offsets
        return self

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Ragged:
        """Build a column from `values` `(tokens, ...)` and the length of each row."""
        array = np.asarray(lengths, dtype=np.int64)
        return cls(values, torch.from_numpy(np.concatenate(([0], np.cumsum(array)))))

    @classmethod
    def from_list(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Build a column from one tensor, array or list of numbers per row.

        Args:
            rows: the rows. Tensors must agree in all axes but the first.
            dtype: dtype of the values. None: the dtype of the tensors; for lists bool, int64 or float32 by their
                content, and int64 if all lists are empty.

        Raises:
            BatchError: if the rows cannot be concatenated.
        """
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        try:
            np.cumsum([len(row) for row in rows], out=offsets[1:])
            if all(isinstance(row, (list, tuple, range)) for row in rows):
                flat = np.array(list(itertools.chain.from_iterable(rows)))
                if not flat.size and flat.ndim == 1:
                    flat = flat.astype(np.int64)
                if flat.dtype == np.float64:
                    values = torch.from_numpy(flat).to(dtype or torch.float32)
                else:
                    values = torch.from_numpy(flat)
            elif all(isinstance(row, np.ndarray) for row in rows):
                values = torch.from_numpy(np.concatenate(rows))
            else:
                parts = [torch.as_tensor(row) for row in rows]
                values = row_copies.join([part.to(dtype or parts[0].dtype) for part in parts])
        except (TypeError, ValueError, RuntimeError) as error:
            raise BatchError(f"a ragged column cannot be made of these {len(rows)} rows: {error}") from error
        return cls(values.to(dtype) if dtype else values, torch.from_numpy(offsets))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.offsets.shape[0] - 1

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Ragged: ...
    def __getitem__(self, row: int | slice) -> Tensor | Ragged:
        """Return a row as a view `(length, ...)`, or consecutive rows as a column."""
        rows = len(self)
        if isinstance(row, slice):
            start, stop, step = row.indices(rows)
            if step != 1:
                raise BatchError(f"a slice of a ragged column must have step 1, not {step}; use take")
            return self.slice(start, max(start, stop))
        if not -rows <= row < rows:
            raise IndexError(f"row {row} is out of range: the ragged column has {rows} rows")
        start, stop = self.offsets[row % rows : row % rows + 2].tolist()
        return self.values[start:stop]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each row as a view."""
        return iter(torch.split(self.values, self.lengths.tolist()) if len(self) else ())

    @property
    def lengths(self) -> Tensor:
        """Length of each row in tokens, int64 `(rows,)` in host memory."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def tokens(self) -> int:
        """Number of values of all rows together."""
        return self.values.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Total size of values and offsets in bytes."""
        return self.values.nbytes + self.offsets.nbytes

    @property
    def row(self) -> Tensor:
        """Row number of each token, int64 `(tokens,)` on the device of the values."""
        rows = np.repeat(np.arange(len(self)), np.diff(self.offsets.numpy()))
        return torch.from_numpy(rows).to(self.device)

    def reduced(self, how: np.ufunc, empty: int = 0) -> Tensor:
        """Return each row's values reduced by `how` (`np.add`, `np.maximum`), int64 `(rows,)` in host memory.

        The result of a row without values is `empty`. Values other than int64 are converted in parts, to save memory.
        """
        offsets, values = self.offsets.numpy(), self.values.cpu().numpy()
        result = np.full(len(self), empty, dtype=np.int64)
        filled = np.flatnonzero(np.diff(offsets))
        for rows in np.array_split(filled, self.tokens // REDUCED_TOKENS + 1):
            if len(rows):
                first, last = offsets[rows[0]], offsets[rows[-1] + 1]
                result[rows] = how.reduceat(values[first:last], offsets[rows] - first, dtype=np.int64)
        return torch.from_numpy(result)

    def like(self, values: Tensor) -> Ragged:
        """Return a column that holds `values` `(tokens, ...)` and has the row lengths of this column.

        Raises:
            BatchError: if there is not one value per token.
        """
        if values.ndim < 1 or values.shape[0] != self.tokens:
            raise BatchError(f"expected one value for each of {self.tokens} tokens, got shape {tuple(values.shape)}")
        wire.check_dtype(values, "the values of a ragged column")
        return Ragged._make(values, self.offsets)

    def aligned(self, other: Ragged) -> bool:
        """Return True if both columns have the same row lengths, so that their values belong to the same tokens."""
        return self.offsets is other.offsets or torch.equal(self.offsets, other.offsets)

    def to_padded(self, value: float | bool, side: Literal["left", "right"] = "right") -> Tensor:
        """Return the rows as one tensor `(rows, longest, ...)`, filled with `value` on `side`.

        Deprecated since contract 1.1: use `torch.nn.utils.rnn.pad_sequence`.
        """
        from enginehouse.plugin.deprecation import deprecated

        instead = "torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True)"
        warnings.warn(deprecated("Ragged.to_padded", since="1.1", instead=instead), stacklevel=2)
        if not len(self):
            return self.values.reshape(0, 0, *self.values.shape[1:])
        return torch.nn.utils.rnn.pad_sequence(list(self), batch_first=True, padding_value=value, padding_side=side)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Ragged:
        """Move the values to `device`. The offsets stay on the host."""
        return Ragged._make(self.values.to(device, non_blocking=non_blocking), self.offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows `start` to `stop` as a view. Both must be within bounds."""
        return self._select(plan_slice(self.offsets, start, stop))

    def take(self, rows: np.ndarray) -> Ragged:
        """Return a copy of the rows with the numbers `rows`, which must be int64 and within bounds."""
        return self._select(plan_take(self.offsets, rows))

    def _select(self, selection: Selection) -> Ragged:
        select, offsets = selection
        return Ragged._make(select(self.values), offsets)

    def equal(self, other: Ragged) -> bool:
        """Return True if row lengths, dtype and values are equal. NaN equals NaN."""
        return self.aligned(other) and same_values(self.values, other.values)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _read_ragged, (
            wire.WIRE_VERSION,
            wire.write_tensor(self.values, protocol),
            wire.write_tensor(self.offsets, protocol),
        )

    def __copy__(self) -> Ragged:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Ragged:
        return self

    def __repr__(self) -> str:
        return f"Ragged({self.describe()})"

    def describe(self) -> str:
        """Describe rows, dtype and lengths in one line."""
        lengths = np.diff(self.offsets.numpy())
        span = f", {lengths.min()} to {lengths.max()} a row" if len(lengths) else ""
        trailing = f" x {tuple(self.values.shape[1:])}" if self.values.ndim > 1 else ""
        device = "" if self.values.is_cpu else f" on {self.device}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{len(self)} rows of {dtype}{trailing}{device}, {self.tokens} tokens{span}"


def _read_ragged(version: int, values: wire.WireTensor, offsets: wire.WireTensor) -> Ragged:
    wire.check_version(version)
    return Ragged._make(wire.read_tensor(values), wire.read_tensor(offsets))


def plan_slice(offsets: Tensor, start: int, stop: int) -> Selection:
    """Return the selection of rows `start` to `stop`, as a view."""
    part = offsets[start : stop + 1]
    array = part.numpy()
    first, last = int(array[0]), int(array[-1])
    return lambda values: values[first:last], part - first if first else part


def plan_take(offsets: Tensor, rows: np.ndarray) -> Selection:
    """Return the selection of the rows at `rows` (int64, within bounds), as a copy."""
    array = offsets.numpy()
    starts, ends = array[rows], array[rows + 1]
    lengths = ends - starts
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    if new_offsets[-1] >= LONG_ROW_TOKENS * len(rows) > 0:
        spans = list(zip(starts.tolist(), ends.tolist()))
        return lambda values: row_copies.join([values[a:b] for a, b in spans]), torch.from_numpy(new_offsets)
    tokens = np.arange(new_offsets[-1])
    tokens += np.repeat(starts - new_offsets[:-1], lengths)
    return lambda values: row_copies.gather(values, tokens), torch.from_numpy(new_offsets)


def join_offsets(parts: Sequence[Tensor]) -> Tensor:
    """Return the offsets of the rows of all parts, end to end."""
    joined = np.zeros(sum(part.shape[0] - 1 for part in parts) + 1, dtype=np.int64)
    row = 0
    for part in parts:
        rows = part.shape[0] - 1
        np.add(part.numpy(), joined[row], out=joined[row : row + rows + 1])
        row += rows
    return torch.from_numpy(joined)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if dtype, shape and values are equal. NaN equals NaN."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a.dtype.itemsize == 1 and a.is_floating_point():  # float8 cannot be compared
        a, b = a.float(), b.float()
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
