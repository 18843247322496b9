"""The `torch` backends conform, at every layout they declare."""

from __future__ import annotations

import pytest

from enginehouse.testing import RolloutEngineSuite, TrainEngineSuite


@pytest.mark.slow
class TestTorch(TrainEngineSuite):
    backend = "torch"


@pytest.mark.slow
class TestTorchRollout(RolloutEngineSuite):
    backend = "torch"
