"""The `megatron` backend conforms, at every layout it declares."""

import pytest
from real_shape import assert_conforms

from enginehouse.plugin import capabilities
from enginehouse_testing import TrainEngineSuite
from enginehouse_testing.checks import checks_of
from enginehouse_testing.running import QUICK

OF_EXPERTS = tuple(check.name for check in checks_of("train") if check.capability == capabilities.EXPERTS)
OTHERS = tuple(check.name for check in checks_of("train") if check.name not in OF_EXPERTS)


@pytest.mark.essential
@pytest.mark.slow
class TestTensorParallel(TrainEngineSuite):
    backend = "megatron"
    layouts = ("tp2",)
    checks = (*QUICK["train"], "half_precision")


@pytest.mark.slow
class TestMegatron(TrainEngineSuite):
    backend = "megatron"
    checks = OTHERS


@pytest.mark.slow
class TestExperts(TrainEngineSuite):
    """Experts, mostly where they are shared out: rows and sequences are split with them as without."""

    backend = "megatron"
    layouts = ("single", "ep2", "tp2-ep2", "pp2-ep2")
    checks = OF_EXPERTS


@pytest.mark.slow
def test_a_model_in_the_shape_of_real_families(ray_cluster):
    assert_conforms("train", "megatron")
