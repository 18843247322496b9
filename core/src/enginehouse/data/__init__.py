"""The batch that roles exchange, and its division into micro-batches.

Each name is imported at its first use, so that reading a data file (`enginehouse_rl.data.files`) needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse.data.balancing import balance
    from enginehouse.data.batch import Batch
    from enginehouse.data.errors import BatchError, UnknownColumnError, WireVersionError
    from enginehouse.data.microbatch import plan_microbatches
    from enginehouse.data.ragged import Ragged
    from enginehouse.data.wire import WIRE_VERSION

__all__ = [
    "WIRE_VERSION",
    "Batch",
    "BatchError",
    "Ragged",
    "UnknownColumnError",
    "WireVersionError",
    "balance",
    "plan_microbatches",
]

__getattr__ = exports(
    __name__,
    {
        "balancing": ["balance"],
        "batch": ["Batch"],
        "errors": ["BatchError", "UnknownColumnError", "WireVersionError"],
        "microbatch": ["plan_microbatches"],
        "ragged": ["Ragged"],
        "wire": ["WIRE_VERSION"],
    },
)
