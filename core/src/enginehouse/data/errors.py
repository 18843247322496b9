"""What can be wrong with a batch. These are mistakes of code; mistakes of data files are `DataError`s."""

from __future__ import annotations

from enginehouse.errors import EnginehouseError


class BatchError(EnginehouseError, ValueError):
    """Columns that do not fit together, or an operation a batch cannot do."""


class UnknownColumnError(BatchError, KeyError):
    """A column the batch does not have; the message names those it has."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr


class WireVersionError(EnginehouseError):
    """A batch written in another wire format than the one this process reads."""
