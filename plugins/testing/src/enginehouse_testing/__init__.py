"""The conformance suite: what a backend or a weight transport must do.

For its author's tests, and for `enginehouse certify`.

Names are imported when first used: pytest is needed by the suites alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse_testing.certificate import Certificate, Result
    from enginehouse_testing.running import certify
    from enginehouse_testing.suite import RolloutEngineSuite, TrainEngineSuite, WeightTransportSuite

__all__ = ["Certificate", "Result", "RolloutEngineSuite", "TrainEngineSuite", "WeightTransportSuite", "certify"]

__getattr__ = exports(
    __name__,
    {
        "certificate": ["Certificate", "Result"],
        "running": ["certify"],
        "suite": ["RolloutEngineSuite", "TrainEngineSuite", "WeightTransportSuite"],
    },
)
