"""Rows of several shards, selected and ordered without reading them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from enginehouse.controller.assembly import Piece
from enginehouse.controller.errors import DispatchError
from enginehouse.controller.shards import Shard
from enginehouse.data import Batch


class ShardRows:
    """A selection of rows from several shards. Immutable.

    Args:
        numbers: indices of the selected rows in the concatenation of all shards, int64.
    """

    __slots__ = ("numbers", "shards", "starts")

    def __init__(self, shards: Sequence[Shard], numbers: np.ndarray):
        self.shards = tuple(shards)
        self.starts = _starts(shards)
        self.numbers = numbers

    def shard_of(self) -> np.ndarray:
        return np.searchsorted(self.starts, self.numbers, side="right") - 1

    def take(self, index: np.ndarray) -> ShardRows:
        """Return the rows at these indices. Shards without a row are dropped, so that their memory can be freed."""
        rows = ShardRows(self.shards, self.numbers[index])
        used, which = np.unique(rows.shard_of(), return_inverse=True)
        if len(used) == len(self.shards):
            return rows
        shards = [self.shards[number] for number in used] or self.shards[:1]  # one shard is kept for its columns
        if not len(used):
            return ShardRows(shards, rows.numbers)
        return ShardRows(shards, rows.numbers - self.starts[used][which] + _starts(shards)[which])

    @staticmethod
    def concat(parts: Sequence[ShardRows]) -> ShardRows:
        """Return all rows of all parts, in order. A shard that occurs in several parts is read once."""
        shards = list({id(shard): shard for part in parts for shard in part.shards}.values())
        starts = dict(zip(map(id, shards), _starts(shards)))
        numbers = []
        for part in parts:
            moved = np.array([starts[id(shard)] - start for shard, start in zip(part.shards, part.starts)])
            numbers.append(part.numbers + moved[part.shard_of()])
        return ShardRows(shards, np.concatenate(numbers))

    def pieces(self, stored: Sequence[str]) -> tuple[tuple[Piece, ...], np.ndarray | None]:
        """Return the pieces to read, shard by shard, and the order of their rows. The order is None if the rows of the
        pieces already have the order of this selection.

        Args:
            stored: columns that are read from the shards.
        """
        of_shard = self.shard_of()
        order = np.argsort(of_shard, kind="stable")
        numbers, of_shard = self.numbers[order], of_shard[order]
        pieces = tuple(
            _make_piece(self.shards[number], numbers[of_shard == number] - self.starts[number], stored)
            for number in (np.unique(of_shard) if len(order) else [0])
        )
        in_order = bool((order == np.arange(len(order))).all())
        return pieces, None if in_order else np.argsort(order)


def join_shards(shards: Sequence[Shard], where: str) -> ShardRows:
    """Return all rows of `shards`, concatenated. `where` is for messages. Raises `DispatchError` if there is no shard,
    or their columns differ in name, kind, dtype or shape of an entry."""
    if not shards:
        raise DispatchError(f"{where}: there is no shard")
    names = tuple(shards[0].facts.kinds)
    for shard in shards:
        if shard.facts.kinds.keys() != set(names):
            raise DispatchError(
                f"{where}: the shards have different columns: {shards[0].origin} has {', '.join(names)}; "
                f"{shard.origin} has {', '.join(shard.facts.kinds)}"
            )
    filled = [shard for shard in shards if shard.facts.rows] or shards[:1]
    for shard in filled[1:]:
        for name in names:
            first, form = filled[0].facts.forms[name], shard.facts.forms[name]
            if first != form:
                raise DispatchError(
                    f"{where}: column {name!r} is {first} from {filled[0].origin}, but {form} from {shard.origin}"
                )
    return ShardRows(filled, np.arange(sum(shard.facts.rows for shard in shards)))


def _starts(shards: Sequence[Shard]) -> np.ndarray:
    return np.cumsum([0, *(shard.facts.rows for shard in shards)])


def _make_piece(shard: Shard, rows: np.ndarray, stored: Sequence[str]) -> Piece:
    """Describe some rows of a shard in the most compact form."""
    if isinstance(shard.place, Batch):  # else all its rows and columns would travel
        return Piece(shard.place.select(stored).take(rows), shard.origin, None)
    if not len(rows) or (rows == np.arange(rows[0], rows[0] + len(rows))).all():
        start = int(rows[0]) if len(rows) else 0
        is_whole = len(rows) == shard.facts.rows
        return Piece(shard.place, shard.origin, None if is_whole else slice(start, start + len(rows)))
    return Piece(shard.place, shard.origin, rows)
