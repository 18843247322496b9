"""Errors of batches. They show mistakes in code. Mistakes in data files are `DataError`s."""

from __future__ import annotations

from enginehouse.errors import EnginehouseError


class BatchError(EnginehouseError, ValueError):
    """Columns do not fit together, or a batch cannot do an operation."""


class UnknownColumnError(BatchError, KeyError):
    """The batch does not have a column. The message names the columns of the batch."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr


class WireVersionError(EnginehouseError):
    """A batch was written in a wire format that this process does not read."""
