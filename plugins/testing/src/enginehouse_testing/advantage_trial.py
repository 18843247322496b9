"""Calls an advantage under test on made-up samples, as a run calls it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.plugin import Advantage, resolve
from enginehouse_testing.samples import OUTPUTS, now, samples
from enginehouse_testing.trial import Trial


@dataclass(frozen=True, slots=True)
class AdvantageTrial(Trial):
    """Calls an advantage with its arguments and additional columns."""

    record: Advantage

    def samples(self, groups: int = 4, size: int = 3) -> Batch:
        """Return the samples of a step with all columns that a run can have. Their rewards differ."""
        batch = samples(self.given.columns, groups, size)
        return batch.drop(["advantages", "weights", "returns", *map(now, OUTPUTS)])

    def call(self, batch: Batch) -> Batch:
        """Return the samples with the columns that the advantage adds."""
        credited: Batch = resolve(self.record.function)(batch, **self.given.arguments)
        return credited

    def credits(self, batch: Batch) -> torch.Tensor:
        """Return the advantage of each token that counts, float64 `(tokens,)`."""
        return by_token(self.call(batch), batch)


def by_token(credited: Batch, batch: Batch) -> torch.Tensor:
    """Return the advantages of all tokens that count, concatenated over the rows, float64."""
    column, mask = credited["advantages"], batch.ragged("loss_mask")
    values = column.values if isinstance(column, Ragged) else column[mask.row]
    return values[mask.values].double()


def problem_of(credited: object, batch: Batch) -> str:
    """Describe the first problem with an advantage's return value; empty if there is none."""
    if not isinstance(credited, Batch):
        return f"it returned {type(credited).__name__}, not a Batch"
    if len(credited) != len(batch):
        return f"it returned {len(credited)} rows, but the batch has {len(batch)}"
    if "advantages" not in credited:
        return f"the batch it returned has no column 'advantages'; it has {', '.join(credited.columns)}"
    column, mask = credited["advantages"], batch.ragged("loss_mask")
    if isinstance(column, Ragged):
        if not column.aligned(mask):
            return "advantages per token must have the row lengths of loss_mask, but have others"
    elif not isinstance(column, torch.Tensor) or column.shape != (len(batch),):
        shape = tuple(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
        return f"advantages must have the shape ({len(batch)},) or be ragged like loss_mask, not {shape}"
    credits = by_token(credited, batch)
    if not bool(credits.isfinite().all()):
        row = int(mask.row[mask.values][~credits.isfinite()][0])
        return f"the advantage of row {row} is not finite"
    return ""
