"""Lists of rows in shards, which are sent in place of a distributed batch, and the code that reads these rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import DataLost

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from enginehouse.data import Batch


ROWS_OF_A_RUN = 4
"""Minimum mean length, in rows, of the runs of consecutive rows for which a batch is copied run by run. Rows of shorter
runs are copied one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one shard.

    Attributes:
        place: object reference of the shard, or a batch from the sending process that contains only the needed rows.
        origin: the call that made the shard, for messages.
        rows: indices of the rows in the shard; None for all rows.
    """

    place: Any
    origin: str
    rows: np.ndarray | slice | None

    def read(self, names: list[str], timeout: float | None) -> tuple[Batch, np.ndarray]:
        """Read the shard's columns `names` through this node's object store, and return them with the row indices."""
        import numpy as np

        columns = _read(self.place, self.origin, timeout).select(names)
        if self.rows is None:
            return columns, np.arange(len(columns))
        return columns, np.arange(self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else self.rows


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """The pieces of a distributed batch, or of a part of one.

    Attributes:
        pieces: rows of shards, which are concatenated.
        order: order of the concatenated rows; None keeps their order.
        names: the columns, in order.
        added: columns from the controller, in the final order of rows.
        beside: further columns from other shards, in the final order of rows.
    """

    pieces: tuple[Piece, ...]
    order: np.ndarray | None
    names: tuple[str, ...]
    added: Batch | None
    beside: Assembly | None = None

    @property
    def nbytes(self) -> int:
        """Total size in bytes: the row indices, the columns that the controller sends, and the rows that the sending
        process holds."""
        travelling: list[Any] = [self.order, self.added, *(piece.rows for piece in self.pieces)]
        travelling += [self.beside, *(piece.place for piece in self.pieces)]
        return sum(getattr(part, "nbytes", 0) for part in travelling)

    def read(self, timeout: float | None = None) -> Batch:
        """Build the batch. Consecutive rows of one shard are a view of the object store. Raises `DataLost` if a shard
        no longer exists, or did not arrive within `timeout` seconds."""
        from enginehouse.data import Batch

        until = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if until is None else max(until - time.monotonic(), 0.001)

        others = [] if self.added is None else [self.added]
        if self.beside is not None:
            others.append(self.beside.read(left()))
        columns = {name: other[name] for other in others for name in other.columns}
        stored = [name for name in self.names if name not in columns]
        if columns and not stored:
            return Batch(columns).select(self.names)
        batch = _arrange([piece.read(stored, left()) for piece in self.pieces], self.order)
        return batch.with_columns(**columns).select(self.names) if columns else batch


def _arrange(parts: Sequence[tuple[Batch, np.ndarray]], order: np.ndarray | None) -> Batch:
    """Concatenate rows of batches, and reorder them by `order`; None keeps their order."""
    import numpy as np

    from enginehouse.data import Batch

    part = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
    row = np.concatenate([rows for _, rows in parts])
    if order is not None:
        part, row = part[order], row[order]
    begins = np.flatnonzero((np.diff(part, prepend=-1) != 0) | (np.diff(row, prepend=-2) != 1)).tolist()
    if len(begins) * ROWS_OF_A_RUN > max(len(row), ROWS_OF_A_RUN):
        batch = Batch.concat([columns.take(rows) for columns, rows in parts])
        return batch if order is None else batch.take(order)
    ends = [*begins[1:], len(row)]
    runs = [parts[part[begin]][0].slice(int(row[begin]), int(row[end - 1]) + 1) for begin, end in zip(begins, ends)]
    return Batch.concat(runs or [columns.slice(0, 0) for columns, _ in parts])


def _read(place: Any, origin: str, timeout: float | None) -> Batch:
    from enginehouse.data import Batch

    if isinstance(place, Batch):
        return place
    import ray

    try:
        return ray.get(place, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise DataLost(f"the result of {origin} did not arrive on this node within {timeout:g} s", origin) from None
    except ray.exceptions.OwnerDiedError:
        raise DataLost(f"the result of {origin} is lost: the program that made this call has ended", origin) from None
    except ray.exceptions.ObjectLostError:
        raise DataLost(f"the result of {origin} is lost: its node has left the cluster", origin) from None
