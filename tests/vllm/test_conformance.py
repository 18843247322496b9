"""The `vllm` backend conforms: everything on one process, and what another layout could change on two."""

from __future__ import annotations

import os

import pytest

from enginehouse_testing import RolloutEngineSuite

RUNTIME = os.environ.get("ENGINEHOUSE_TEST_VLLM_RUNTIME", "auto")


@pytest.mark.slow
class TestVLLM(RolloutEngineSuite):
    backend = "vllm"
    layouts = ("single",)
    runtime = RUNTIME


@pytest.mark.slow
@pytest.mark.exhaustive
class TestTensorParallel(RolloutEngineSuite):
    backend = "vllm"
    layouts = ("tp2",)
    checks = ("greedy", "logprobs", "prompt_logprobs", "update", "interrupted_update", "shutdown")
    runtime = RUNTIME
