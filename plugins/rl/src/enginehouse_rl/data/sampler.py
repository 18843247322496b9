"""Samples rows from the sources of a data set by weight, in a new order each epoch, and resumes at the exact row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from enginehouse.errors import DataError
from enginehouse_rl.data.sources import Source

if TYPE_CHECKING:
    from enginehouse.data.batch import Batch

_SERIALS_AT_ONCE = 4096
"""Number of consecutive serial numbers that form a part. For the beginning of each part, the sampler stores how many
rows it has sampled from each source."""
_GOLDEN = 0x9E3779B97F4A7C15
"""The fractional part of the golden ratio, in units of 2**-64. Modulo 1, its multiples are spread most evenly."""


class RowSource(Protocol):
    """A data set that a sampler samples from."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Batch:
        """Return the rows at `indices` (int64), in this order."""
        ...


D = TypeVar("D", bound=RowSource)


class Sampler(Generic[D]):
    """Samples a fixed number of rows per step from a data set, without end.

    Each epoch of a source goes once through all of its rows, in an order that depends only on `(seed, epoch)` and the
    index of the source. A step that reaches the end of an epoch continues with the next epoch. The source of a row
    depends only on the seed, the weights and the serial number of the row. Among any consecutive rows, the fraction of
    each source matches its weight, to within a few rows.

    Attributes:
        drawn: the number of rows sampled so far; their serial numbers begin at 0.
    """

    def __init__(
        self,
        dataset: D,
        rows_per_step: int,
        seed: int = 0,
        sources: Sequence[Source] = (),
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Start before the first row of epoch 0.

        Args:
            rows_per_step: the number of rows that `next` returns.
            sources: the sources of the data set's rows, one after the other; empty: all rows are one source.
            ranks: the rank of each row. In each epoch, rows with lower ranks come first, and rows of equal rank are
                shuffled; None: all rows are shuffled.

        Raises:
            ValueError: `rows_per_step` is not positive, or the data set or a source is empty.
        """
        if rows_per_step < 1 or not len(dataset):
            raise ValueError(f"cannot take {rows_per_step} rows a step from {len(dataset)} rows")
        self.dataset = dataset
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.drawn = 0
        self._sources = tuple(sources) or (Source("", "", len(dataset), 1.0),)
        self._sizes = np.array([source.rows for source in self._sources], dtype=np.int64)
        if self._sizes.sum() != len(dataset) or not self._sizes.all():
            raise ValueError(f"the sources have {self._sizes.tolist()} rows, but the data set has {len(dataset)} rows")
        self._starts = np.cumsum(self._sizes) - self._sizes
        weights = [Fraction(source.weight) for source in self._sources]
        bounds = [int(2**64 * part / sum(weights)) for part in accumulate(weights[:-1])]
        self._bounds = np.array(bounds, dtype=np.uint64)
        self._ranks = None if ranks is None else np.array(ranks, dtype=np.int64)
        self._forget()

    def next(self) -> Batch:
        return self.rows(self.next_serials(self.rows_per_step))

    def next_serials(self, count: int) -> range:
        """Return the serial numbers of the next `count` rows, and count these rows as sampled."""
        self.drawn += count
        return range(self.drawn - count, self.drawn)

    def rows(self, serials: Sequence[int]) -> Batch:
        """Return the rows with these serial numbers, in this order, whether or not they were sampled before."""
        indices = []
        for serial in serials:
            source, number = self._locate(serial)
            epoch, position = divmod(number, int(self._sizes[source]))
            indices.append(self._starts[source] + self._shuffle(source, epoch)[position])
        return self.dataset.rows(np.array(indices, dtype=np.int64))

    def epochs(self) -> dict[str, float]:
        """Return the number of epochs of each source that were sampled, by the name of the source."""
        counts = self._count(self.drawn)
        return {source.name: int(count) / source.rows for source, count in zip(self._sources, counts, strict=True)}

    def metrics(self) -> dict[str, float]:
        """Return `epochs` as metrics: `data/NAME/epoch`, or `data/epoch` for a single source."""
        return {f"data/{name}/epoch" if name else "data/epoch": epoch for name, epoch in self.epochs().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the position of the sampler as plain numbers."""
        epoch, position = divmod(self.drawn, len(self.dataset))
        state: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "position": position, "rows": len(self.dataset)}
        return state | ({"sources": self._list_sources()} if len(self._sources) > 1 else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the seed and position of a `state_dict`. The number of rows per step may differ.

        Raises:
            DataError: the data set or a source had another number of rows when the state was taken, or the state is
                damaged.
        """
        for name in ("seed", "epoch", "position", "rows"):
            value = state.get(name)
            if type(value) is not int or (value < 0 and name != "seed"):
                raise DataError(
                    f"cannot resume: the checkpoint is damaged: the sampler's {name} must be a whole number"
                    f"{'' if name == 'seed' else ', 0 or more'}, not {value!r}"
                )
        if state["rows"] != len(self.dataset):
            raise DataError(
                f"cannot resume: the checkpoint was written with a data set of {state['rows']} rows, but this data "
                f"set has {len(self.dataset)} rows. Resume with the same file, or start a new run"
            )
        if len(self._sources) > 1 and (sources := state.get("sources")) != self._list_sources():
            raise DataError(
                f"cannot resume: the checkpoint was written with the files {sources} of data.train (name and number of "
                f"rows), but this run has {self._list_sources()}. Resume with the same files in the same order, or "
                "start a new run"
            )
        if state["position"] > len(self.dataset):
            raise DataError(
                f"cannot resume: the checkpoint is damaged: the sampler's position must be at most "
                f"{len(self.dataset)}, the number of rows, not {state['position']}"
            )
        self.seed = state["seed"]
        self.drawn = state["epoch"] * len(self.dataset) + state["position"]
        self._forget()

    def _list_sources(self) -> list[list[Any]]:
        """Return the name and the number of rows of each source, as JSON types."""
        return [[source.name, source.rows] for source in self._sources]

    def _forget(self) -> None:
        """Forget the orders and counts of another seed."""
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._before = [np.zeros(len(self._sources), dtype=np.int64)]  # the counts before each part of the serials
        self._offset = np.uint64(int(np.random.default_rng([self.seed % 2**64]).integers(2**64, dtype=np.uint64)))

    def _locate(self, serial: int) -> tuple[int, int]:
        """Return the index of the source of a serial number, and the number of rows sampled from this source before."""
        if len(self._sources) == 1:
            return 0, serial
        part = serial // _SERIALS_AT_ONCE
        sources = self._find_sources(part, serial - part * _SERIALS_AT_ONCE + 1)
        source = int(sources[-1])
        return source, int(self._before[part][source] + np.count_nonzero(sources[:-1] == source))

    def _count(self, drawn: int) -> np.ndarray:
        """Count the rows of each source among the first `drawn` serial numbers."""
        if len(self._sources) == 1:
            return np.array([drawn])
        part = drawn // _SERIALS_AT_ONCE
        within = self._find_sources(part, drawn - part * _SERIALS_AT_ONCE)
        return self._before[part] + np.bincount(within, minlength=len(self._sources))

    def _find_sources(self, part: int, count: int) -> np.ndarray:
        """Return the index of the source of each of the first `count` serial numbers of a part (`_SERIALS_AT_ONCE`)."""
        while len(self._before) <= part:
            earlier = self._find_sources(len(self._before) - 1, _SERIALS_AT_ONCE)
            self._before.append(self._before[-1] + np.bincount(earlier, minlength=len(self._sources)))
        serials = np.arange(part * _SERIALS_AT_ONCE, part * _SERIALS_AT_ONCE + count, dtype=np.uint64)
        return np.searchsorted(self._bounds, serials * np.uint64(_GOLDEN) + self._offset, side="right")

    def _shuffle(self, source: int, epoch: int) -> np.ndarray:
        if (source, epoch) not in self._orders:
            epochs = sorted(number for of, number in self._orders if of == source)
            for old in epochs[:-1]:  # rows come from one epoch, or from the end of one and the start of the next
                del self._orders[source, old]
            drawn_by = [self.seed % 2**64, epoch, *([source] if source else [])]
            order = np.random.default_rng(drawn_by).permutation(self._sizes[source])
            if self._ranks is not None:
                start = self._starts[source]
                order = order[np.argsort(self._ranks[start : start + len(order)][order], kind="stable")]
            self._orders[source, epoch] = order
        return self._orders[source, epoch]
