"""The `sglang` backend conforms: everything on one process, and what another layout could change on two."""

import os

import pytest

from enginehouse_testing import RolloutEngineSuite
from enginehouse_testing.checks import checks_of

LAUNCHED_FOR_ONE = ("colocates", "killed", "unloadable", "update_experts", "update_untied")
"""Checks that have the engine launched for themselves."""

CHECKS = tuple(check.name for check in checks_of("rollout"))
RUNTIME = os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto")


@pytest.mark.essential
@pytest.mark.slow
class TestSGLang(RolloutEngineSuite):
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
@pytest.mark.exhaustive
class TestTensorParallel(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("tp2",)
    checks = ("greedy", "logprobs", "update", "shutdown")
    runtime = RUNTIME
