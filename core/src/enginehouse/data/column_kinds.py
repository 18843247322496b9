"""The three kinds of column in a batch, and operations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from enginehouse.data import ragged, row_copies, wire
from enginehouse.data.errors import BatchError
from enginehouse.data.ragged import Ragged

Column = Tensor | Ragged | tuple[Any, ...]
"""A dense tensor `(rows, ...)`, a ragged column, or one Python object per row."""

Plan = TypeVar("Plan")


def as_column(name: str, value: Any) -> Column:
    """Check one column and convert it to its stored form."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OUST":
            return tuple(value.tolist())
        try:
            value = wire.view_array(value)
        except TypeError as error:
            raise TypeError(f"column {name!r}: a numpy array of {value.dtype} cannot be a column: {error}") from error
    if isinstance(value, Ragged):
        return value
    if isinstance(value, Tensor):
        if not value.ndim:
            raise BatchError(f"column {name!r} is a single number, but a dense column must have the shape (rows, ...)")
        wire.check_dtype(value, f"column {name!r}")
        return value
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (Tensor, np.ndarray)):
            raise TypeError(
                f"column {name!r} is a list of tensors: use Ragged.from_list(...) for sequences of different length, "
                "torch.stack(...) for equal shapes"
            )
        return tuple(value)
    raise TypeError(f"column {name!r} must be a tensor, a numpy array, a Ragged or a list, not {type(value).__name__}")


def common_rows(columns: Mapping[str, Any]) -> int:
    """Return the row count of all columns; 0 if there are none."""
    lengths = [len(column) for column in columns.values()]
    if len(set(lengths)) > 1:
        counts = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise BatchError(f"the columns of a batch must have the same number of rows, but have: {counts}")
    return lengths[0] if lengths else 0


def share_offsets(columns: dict[str, Any]) -> dict[str, Any]:
    """Let ragged columns with equal row lengths share one offsets tensor, to send, slice and join it once."""
    known: list[Tensor] = []
    for name, column in columns.items():
        if not isinstance(column, Ragged) or any(column.offsets is offsets for offsets in known):
            continue
        for offsets in known:
            if torch.equal(column.offsets, offsets):
                columns[name] = Ragged._make(column.values, offsets)
                break
        else:
            known.append(column.offsets)
    return columns


def part_sizes(rows: int, parts: int | Sequence[int]) -> list[int]:
    """Return the sizes of consecutive parts, given as sizes or as a number of parts."""
    if isinstance(parts, int):
        if parts < 1:
            raise BatchError(f"a batch cannot be split into {parts} parts")
        size, larger = divmod(rows, parts)
        return [size + 1] * larger + [size] * (parts - larger)
    sizes = [int(size) for size in parts]
    if sum(sizes) != rows or min(sizes, default=0) < 0:
        raise BatchError(f"sizes {sizes} do not add up to the batch's {rows} rows")
    return sizes


def check_same_names(batches: Sequence[Mapping[str, Any]]) -> None:
    """Check that the columns of all batches have the same names."""
    first = batches[0]
    for number, columns in enumerate(batches):
        if columns.keys() != first.keys():
            raise BatchError(
                f"batches to concatenate have different columns: batch 0 has {', '.join(first)}; "
                f"batch {number} has {', '.join(columns)}"
            )


def as_names(names: Iterable[str]) -> list[str]:
    """Return column names as a list. Reject a single string, which Python would iterate letter by letter."""
    if isinstance(names, str):
        raise TypeError(f"expected a list of column names, got the string {names!r}")
    return list(names)


def row_index(rows: Sequence[int] | Tensor | np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the rows that `rows`, indices or a mask, selects from `count` rows. They are int64 and not
    negative."""
    index = rows.cpu().numpy() if isinstance(rows, Tensor) else np.asarray(rows)
    if index.ndim == 1 and not index.size and index.dtype.kind == "f":
        index = index.astype(np.int64)  # numpy and torch make an empty list an array of floats
    if index.ndim != 1 or index.dtype.kind not in "iub":
        raise BatchError(f"rows must be a list of integers or a mask, not {index.dtype} of shape {index.shape}")
    if index.dtype.kind == "b":
        if len(index) != count:
            raise BatchError(f"a mask of {len(index)} rows does not fit a batch of {count} rows")
        return np.flatnonzero(index)
    index = index.astype(np.int64)
    outside = index[(index < -count) | (index >= count)]
    if len(outside):
        raise IndexError(f"row {int(outside[0])} is out of range: the batch has {count} rows")
    return np.where(index < 0, index + count, index)


def memoize(plan: Callable[[Tensor], Plan]) -> Callable[[Tensor], Plan]:
    """Return a function like `plan` that computes its result once for all columns that share an offsets tensor."""
    plans: dict[int, Plan] = {}

    def get(offsets: Tensor) -> Plan:
        key = id(offsets)
        if key not in plans:
            plans[key] = plan(offsets)
        return plans[key]

    return get


def join_columns(name: str, parts: list[Any], joined: dict[tuple[int, ...], Tensor]) -> Column:
    """Join the parts of one column. `joined` remembers offsets that several columns share."""
    first = parts[0]
    kind = Ragged if isinstance(first, Ragged) else Tensor if isinstance(first, Tensor) else tuple
    for number, part in enumerate(parts):
        if not isinstance(part, kind) or (kind is not tuple and _row_type(part) != _row_type(first)):
            raise BatchError(
                f"column {name!r} differs between batches to concatenate: {describe_column(first)} in batch 0, "
                f"{describe_column(part)} in batch {number}"
            )
    if kind is tuple:
        return tuple([item for part in parts for item in part])
    if kind is Tensor:
        return row_copies.join(parts)
    key = tuple([id(part.offsets) for part in parts])
    if key not in joined:
        joined[key] = ragged.join_offsets([part.offsets for part in parts])
    return Ragged._make(row_copies.join([part.values for part in parts]), joined[key])


def column_form(column: Any) -> str:
    """Describe the properties that must agree to join columns: kind, dtype and shape of an entry."""
    if isinstance(column, tuple):
        return "objects"
    dtype, shape, _ = _row_type(column)
    kind = "ragged" if isinstance(column, Ragged) else "dense"
    return f"{kind} {str(dtype).removeprefix('torch.')}{f' of {tuple(shape)}' if shape else ''}"


def _row_type(column: Any) -> tuple[Any, ...]:
    values = column.values if isinstance(column, Ragged) else column
    return values.dtype, values.shape[1:], values.device


def same_column(a: Any, b: Any) -> bool:
    """Return True if kind, dtype, row lengths and values are equal. NaN equals NaN."""
    if isinstance(a, Ragged):
        return isinstance(b, Ragged) and a.equal(b)
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and ragged.same_values(a, b)
    return isinstance(b, tuple) and a == b


def describe_column(column: Any) -> str:
    """Describe kind, dtype and shape of a column in one line."""
    if isinstance(column, Ragged):
        return f"ragged, {column.describe()}"
    if isinstance(column, Tensor):
        device = "" if column.is_cpu else f" on {column.device}"
        return f"dense {str(column.dtype).removeprefix('torch.')} {tuple(column.shape)}{device}"
    return f"{len(column)} objects ({', '.join(sorted({type(item).__name__ for item in column[:100]})) or 'none'})"
