"""Which rows of a data set come next: a fresh order each epoch, resumable to the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from enginehouse.errors import DataError

if TYPE_CHECKING:
    from enginehouse.data.batch import Batch


class RowSource(Protocol):
    """A data set as a sampler sees it."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` (int64), in this order."""
        ...


class Sampler:
    """Draws a fixed number of rows a step from a data set, for ever.

    Each epoch goes once through all rows in an order that depends on `(seed, epoch)` alone. A step that reaches
    the end of an epoch goes on with the next one.

    Attributes:
        drawn: how many rows were drawn; they have the serial numbers from 0 to below it.
    """

    def __init__(self, dataset: RowSource, rows_per_step: int, seed: int = 0) -> None:
        """Start before the first row of epoch 0.

        Raises:
            ValueError: if `rows_per_step` is not positive or the data set is empty.
        """
        if rows_per_step < 1 or not len(dataset):
            raise ValueError(f"cannot draw {rows_per_step} rows a step from {len(dataset)} rows")
        self.dataset = dataset
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.drawn = 0
        self._orders: dict[int, np.ndarray] = {}

    def next(self) -> Batch:
        """The next step's rows."""
        return self.rows(self.next_serials(self.rows_per_step))

    def next_serials(self, count: int) -> range:
        """Serial numbers of the next `count` rows."""
        self.drawn += count
        return range(self.drawn - count, self.drawn)

    def rows(self, serials: Sequence[int]) -> Batch:
        """The rows of these serial numbers, in this order; drawn before or not."""
        rows = len(self.dataset)
        return self.dataset.rows(
            np.array([self._order(serial // rows)[serial % rows] for serial in serials], dtype=np.int64)
        )

    def state_dict(self) -> dict[str, int]:
        """Where the sampler stands, as plain numbers."""
        epoch, position = divmod(self.drawn, len(self.dataset))
        return {"seed": self.seed, "epoch": epoch, "position": position, "rows": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with its seed; the number of rows a step may differ.

        Raises:
            DataError: if the data set has another number of rows than the one the state was taken of, or the state is
                none that `state_dict` gives.
        """
        for name in ("seed", "epoch", "position", "rows"):
            value = state.get(name)
            if type(value) is not int or (value < 0 and name != "seed"):
                raise DataError(
                    f"cannot resume: the checkpoint is damaged: the sampler's {name} is {value!r}, where a whole "
                    "number is wanted, none below 0 but the seed"
                )
        if state["rows"] != len(self.dataset):
            raise DataError(
                f"cannot resume: the checkpoint was written with a data set of {state['rows']} rows, "
                f"this one has {len(self.dataset)}. Resume with the same file, or start a new run"
            )
        if state["position"] > len(self.dataset):
            raise DataError(
                f"cannot resume: the checkpoint is damaged: the sampler's position is {state['position']}, in "
                f"{len(self.dataset)} rows"
            )
        self.seed = state["seed"]
        self.drawn = state["epoch"] * len(self.dataset) + state["position"]
        self._orders = {}

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            while len(self._orders) > 1:  # rows come from one epoch, or from two that meet
                del self._orders[min(self._orders)]
            self._orders[epoch] = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.dataset))
        return self._orders[epoch]
