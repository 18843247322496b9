"""The `sglang` backend conforms: in `make test` by the checks to begin with, else by all.

One process has everything; two have what another layout could change.
"""

import os

import pytest
from real_shape import assert_conforms

from enginehouse_testing import RolloutEngineSuite
from enginehouse_testing.checks import checks_of
from enginehouse_testing.running import QUICK

LAUNCHED_FOR_ONE = ("colocates", "killed", "unloadable", "update_experts", "update_untied")
"""Checks that have the engine launched for themselves."""

CHECKS = tuple(check.name for check in checks_of("rollout"))
RUNTIME = os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto")


@pytest.mark.essential
@pytest.mark.slow
class TestSGLang(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("single",)
    checks = QUICK["rollout"]
    runtime = RUNTIME


@pytest.mark.slow
class TestWhole(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("single",)
    checks = tuple(name for name in CHECKS if name not in LAUNCHED_FOR_ONE)
    runtime = RUNTIME


@pytest.mark.slow
class TestFurtherLaunches(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("single",)
    checks = LAUNCHED_FOR_ONE
    runtime = RUNTIME


@pytest.mark.slow
class TestTensorParallel(RolloutEngineSuite):
    """Two processes, and a prefix cache, which SGLang has on a CPU only where it is not deterministic."""

    backend = "sglang"
    layouts = ("tp2",)
    checks = (
        "greedy", "logprobs", "update", "prefix_cache", "kept_recomputed", "pause_keep_cache", "adapter_kept_cache",
        "shutdown",
    )  # fmt: skip
    runtime = RUNTIME


@pytest.mark.slow
def test_a_model_in_the_shape_of_real_families(ray_cluster):
    assert_conforms("rollout", "sglang", runtime=RUNTIME)
