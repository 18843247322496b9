"""The `torch` backends conform; four processes are two twice over."""

import pytest

from enginehouse_testing import RolloutEngineSuite, TrainEngineSuite


@pytest.mark.essential
@pytest.mark.slow
class TestTorch(TrainEngineSuite):
    backend = "torch"
    layouts = ("dp2",)


@pytest.mark.slow
class TestTorchAlone(TrainEngineSuite):
    backend = "torch"
    layouts = ("single",)


@pytest.mark.essential
@pytest.mark.slow
class TestTorchRollout(RolloutEngineSuite):
    backend = "torch"
