"""How a process reads a distributed batch: a list of which rows of which shards, which travels instead of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import DataLost

if TYPE_CHECKING:
    import numpy as np

    from enginehouse.data import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of one shard; `rows` is None for all of them. `place` and `origin` are those of the shard."""

    place: Any
    origin: str
    rows: np.ndarray | None

    def read(self, names: list[str], timeout: float | None) -> Batch:
        """These columns of the rows, from this node's object store, to which the shard travels if it is on another."""
        shard = _read(self.place, self.origin, timeout)
        columns = shard.select(names)
        return columns if self.rows is None else columns.take(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """What a process reads to have a distributed batch, or a part of one: it travels instead of the rows.

    Attributes:
        pieces: what to take of which shard, put end to end.
        order: how to arrange the rows then; None: as they are.
        names: the columns, in order.
        added: columns that come from the controller, in the final order of rows.
    """

    pieces: tuple[Piece, ...]
    order: np.ndarray | None
    names: tuple[str, ...]
    added: Batch | None

    @property
    def nbytes(self) -> int:
        """Bytes of what travels: the row numbers and the columns from the controller."""
        plans = [self.order, *(piece.rows for piece in self.pieces)]
        return sum(plan.nbytes for plan in plans if plan is not None) + (0 if self.added is None else self.added.nbytes)

    def read(self, timeout: float | None = None) -> Batch:
        """Put the batch together here; rows that follow each other in one shard are a view of the store.

        Raises:
            DataLost: a shard is not there any more, or did not come within `timeout` seconds.
        """
        from enginehouse.data import Batch

        stored = [name for name in self.names if self.added is None or name not in self.added]
        if self.added is not None and not stored:
            return self.added.select(self.names)
        batch = Batch.concat([piece.read(stored, timeout) for piece in self.pieces])
        if self.order is not None:
            batch = batch.take(self.order)
        if self.added is None:
            return batch
        return batch.with_columns(**{name: self.added[name] for name in self.added.columns}).select(self.names)


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
