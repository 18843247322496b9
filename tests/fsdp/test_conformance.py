"""The `fsdp` backend conforms at the layouts it declares; where two are combined, in what the other could change.

Four shards are cut and put together as two are: that layout is for `enginehouse certify`.
"""

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
class TestSharded(TrainEngineSuite):
    backend = "fsdp"
    layouts = ("shard2",)
    checks = (*QUICK["train"], "half_precision")


@pytest.mark.slow
class TestFSDP(TrainEngineSuite):
    backend = "fsdp"
    layouts = ("single", "shard2", "replicas2-shard2", "tp2", "cp2")
    checks = OTHERS


@pytest.mark.slow
class TestExperts(TrainEngineSuite):
    backend = "fsdp"
    layouts = ("shard2", "replicas2-shard2")
    checks = OF_EXPERTS


@pytest.mark.exhaustive
@pytest.mark.slow
class TestCombined(TrainEngineSuite):
    """How rows are cut, rounded and put away is the same on the axes together as on each alone."""

    backend = "fsdp"
    layouts = ("shard2-tp2", "shard2-cp2")
    checks = (
        "logprobs",
        "gradients",
        "metrics",
        "training",
        "skips_nonfinite",
        "weights",
        "export",
        "checkpoint",
        "value_head",
        "lora",
        "half_precision_cuda",
        "cuda_memory_freed_by_offload",
    )


@pytest.mark.slow
def test_a_model_in_the_shape_of_real_families(ray_cluster):
    assert_conforms("train", "fsdp", layouts=["shard2"])
