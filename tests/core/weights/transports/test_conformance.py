"""The built-in weight transports conform."""

from __future__ import annotations

from enginehouse_testing import WeightTransportSuite


class TestInproc(WeightTransportSuite):
    transport = "inproc"


class TestSharedMemory(WeightTransportSuite):
    transport = "shared_memory"


class TestCollective(WeightTransportSuite):
    transport = "collective"


class TestPointToPoint(WeightTransportSuite):
    transport = "point_to_point"
