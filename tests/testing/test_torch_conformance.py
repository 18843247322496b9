"""The `torch` backends conform: in `make test` by the checks to begin with; four processes are two twice over."""

import pytest

from enginehouse_testing import RolloutEngineSuite, TrainEngineSuite
from enginehouse_testing.running import QUICK


@pytest.mark.essential
@pytest.mark.slow
class TestTorch(TrainEngineSuite):
    backend = "torch"
    layouts = ("dp2",)
    checks = (*QUICK["train"], "half_precision")


@pytest.mark.slow
class TestTorchWhole(TrainEngineSuite):
    backend = "torch"
    layouts = ("single", "dp2")


@pytest.mark.essential
@pytest.mark.slow
class TestTorchRollout(RolloutEngineSuite):
    backend = "torch"
    checks = QUICK["rollout"]


@pytest.mark.slow
class TestTorchRolloutWhole(RolloutEngineSuite):
    backend = "torch"
