"""The built-in weight transports conform."""

import pytest

from enginehouse_testing import WeightTransportSuite


class TestInproc(WeightTransportSuite):
    transport = "inproc"


class TestSharedMemory(WeightTransportSuite):
    transport = "shared_memory"


@pytest.mark.slow
class TestCollective(WeightTransportSuite):
    transport = "collective"


@pytest.mark.slow
class TestPointToPoint(WeightTransportSuite):
    transport = "point_to_point"


@pytest.mark.slow
class TestDifferences(WeightTransportSuite):
    transport = "differences"
