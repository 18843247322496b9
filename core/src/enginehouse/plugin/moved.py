"""Old import paths from which plugins of contract 1.0 import names. The old imports still work, with a warning.

A module that had such a name ends with a `__getattr__` that calls `resolve_old_address`. `enginehouse plugins doctor`
reads `MOVED`. To move a name that docs/contract/ lists, use `enginehouse.plugin.deprecation` instead.
"""

import warnings
from typing import Any

from enginehouse.plugin.deprecation import deprecated
from enginehouse.plugin.records import resolve

_SUITES = ("Certificate", "Result", "RolloutEngineSuite", "TrainEngineSuite", "WeightTransportSuite", "certify")
_ALGORITHMS = (
    "advantages.groups.group_statistics", "advantages.groups.group_sums", "advantages.tokens.CountedTokens",
    "losses.aggregate.aggregate", "losses.policy.PolicyTokens", "losses.policy.policy_loss",
)  # fmt: skip
MOVED = {
    "enginehouse.engines.weights.checksum": "enginehouse.weights.checksum",
    **{f"enginehouse.testing.{name}": f"enginehouse_testing.{name}" for name in _SUITES},
    **{f"enginehouse.rl.{name}": f"enginehouse_rl.{name}" for name in _ALGORITHMS},
}
"""New import path of each name, by its old import path."""


def resolve_old_address(module: str, name: str) -> Any:
    """Return the value of a name that a module no longer has, with a warning that states the new import path. Raises
    `AttributeError` if the module never had the name."""
    address = f"{module}.{name}"
    if address not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(deprecated(address, since="1.1", instead=MOVED[address]), stacklevel=3)
    return resolve(":".join(MOVED[address].rsplit(".", 1)))
