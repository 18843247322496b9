"""The `sglang` backend conforms: everything on one process, and what another layout could change on two."""

from __future__ import annotations

import os

import pytest

from enginehouse_testing import RolloutEngineSuite

RUNTIME = os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto")


@pytest.mark.slow
class TestSGLang(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("single",)
    runtime = RUNTIME


@pytest.mark.slow
@pytest.mark.exhaustive
class TestTensorParallel(RolloutEngineSuite):
    backend = "sglang"
    layouts = ("tp2",)
    checks = ("greedy", "logprobs", "update", "shutdown")
    runtime = RUNTIME
