"""How a process reads a distributed batch: a list of which rows of which shards, which travels instead of the rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import DataLost

if TYPE_CHECKING:
    import numpy as np

    from enginehouse.data import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one shard; `rows` is None for all of them. `place` and `origin` are those of the shard; a place that is a
    batch of the sending process holds only what is needed."""

    place: Any
    origin: str
    rows: np.ndarray | slice | None

    def read(self, names: list[str], timeout: float | None) -> Batch:
        """These columns of the rows, from this node's object store, to which the shard travels if it is on another."""
        shard = _read(self.place, self.origin, timeout)
        columns = shard.select(names)
        if isinstance(self.rows, slice):
            return columns.slice(self.rows.start, self.rows.stop)
        return columns if self.rows is None else columns.take(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """What a process reads to have a distributed batch, or a part of one: it travels instead of the rows.

    Attributes:
        pieces: what to take of which shard, put end to end.
        order: how to arrange the rows then; None: as they are.
        names: the columns, in order.
        added: columns that come from the controller, in the final order of rows.
        beside: further columns, in the final order of rows too.
    """

    pieces: tuple[Piece, ...]
    order: np.ndarray | None
    names: tuple[str, ...]
    added: Batch | None
    beside: Assembly | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what travels: row numbers, columns from the controller, rows that are in the sending process."""
        travelling: list[Any] = [self.order, self.added, *(piece.rows for piece in self.pieces)]
        travelling += [self.beside, *(piece.place for piece in self.pieces)]
        return sum(getattr(part, "nbytes", 0) for part in travelling)

    def read(self, timeout: float | None = None) -> Batch:
        """Put the batch together here; rows that follow each other in one shard are a view of the store.

        Raises:
            DataLost: a shard is not there any more, or did not come within `timeout` seconds.
        """
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
        batch = Batch.concat([piece.read(stored, left()) for piece in self.pieces])
        if self.order is not None:
            batch = batch.take(self.order)
        return batch.with_columns(**columns).select(self.names) if columns else batch


def _read(place: Any, origin: str, timeout: float | None) -> Batch:
    from enginehouse.data import Batch

    if isinstance(place, Batch):
        return place
    import ray

    try:
        return ray.get(place, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise DataLost(f"the result of {origin} did not come to this node within {timeout:g} s", origin) from None
    except ray.exceptions.OwnerDiedError:
        raise DataLost(f"the result of {origin} is lost: the program that called it has ended", origin) from None
    except ray.exceptions.ObjectLostError:
        raise DataLost(f"the result of {origin} is lost: its node has left the cluster", origin) from None
