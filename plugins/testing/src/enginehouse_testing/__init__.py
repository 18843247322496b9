"""The conformance suites: what an engine, a weight transport, or any other part of a plugin must do.

Authors run them as tests of their plugin, or with `enginehouse certify`.

Names are imported when first used: only the suites need pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse_testing.certificate import Certificate, Result
    from enginehouse_testing.given import Given
    from enginehouse_testing.running import certify
    from enginehouse_testing.suite import (
        AdvantageSuite,
        EnvironmentSuite,
        LossSuite,
        RewardSuite,
        RolloutEngineSuite,
        TrackerSuite,
        TrainEngineSuite,
        WeightTransportSuite,
    )

__all__ = [
    "AdvantageSuite",
    "Certificate",
    "EnvironmentSuite",
    "Given",
    "LossSuite",
    "Result",
    "RewardSuite",
    "RolloutEngineSuite",
    "TrackerSuite",
    "TrainEngineSuite",
    "WeightTransportSuite",
    "certify",
]

__getattr__ = exports(
    __name__,
    {
        "certificate": ["Certificate", "Result"],
        "given": ["Given"],
        "running": ["certify"],
        "suite": [
            "AdvantageSuite",
            "EnvironmentSuite",
            "LossSuite",
            "RewardSuite",
            "RolloutEngineSuite",
            "TrackerSuite",
            "TrainEngineSuite",
            "WeightTransportSuite",
        ],
    },
)
