"""An advantage under test: called as a run calls it, on made-up samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.plugin import Advantage, resolve
from enginehouse_testing.given import Given
from enginehouse_testing.samples import OUTPUTS, now, samples


@dataclass(frozen=True, slots=True)
class AdvantageTrial:
    """What an act is given.

    Attributes:
        record: the advantage.
        given: its arguments, and further columns.
    """

    record: Advantage
    given: Given

    def samples(self, groups: int = 4, size: int = 3) -> Batch:
        """Samples of a step, with all columns that a run can have; rewards differ."""
        made = samples(self.given.columns, groups, size)
        return made.drop(["advantages", "weights", "returns", *map(now, OUTPUTS)])

    def call(self, batch: Batch) -> Batch:
        """The samples with what the advantage adds."""
        made: Batch = resolve(self.record.function)(batch, **self.given.arguments)
        return made

    def credits(self, batch: Batch) -> torch.Tensor:
        """The advantage of each token that counts, float64 `(counted,)`."""
        return by_token(self.call(batch), batch)


def by_token(made: Batch, batch: Batch) -> torch.Tensor:
    """The advantages of the tokens that count, one after the other, float64."""
    column, mask = made["advantages"], batch.ragged("loss_mask")
    values = column.values if isinstance(column, Ragged) else column[mask.row]
    return values[mask.values].double()


def problem_of(made: object, batch: Batch) -> str:
    """What is wrong with what an advantage returned for samples, whatever it computes; empty: nothing."""
    if not isinstance(made, Batch):
        return f"it returned {type(made).__name__}, not a Batch"
    if len(made) != len(batch):
        return f"it returned {len(made)} rows of {len(batch)}"
    if "advantages" not in made:
        return f"the batch it returned has no column 'advantages'; it has {', '.join(made.columns)}"
    column, mask = made["advantages"], batch.ragged("loss_mask")
    if isinstance(column, Ragged):
        if not column.aligned(mask):
            return "advantages by token do not have the rows' lengths, those of loss_mask"
    elif not isinstance(column, torch.Tensor) or column.shape != (len(batch),):
        shape = tuple(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
        return f"advantages are {shape}, neither one a row, ({len(batch)},), nor ragged like loss_mask"
    credits = by_token(made, batch)
    if not bool(credits.isfinite().all()):
        row = int(mask.row[mask.values][~credits.isfinite()][0])
        return f"the advantage of row {row} is not finite"
    return ""
