"""The real runtimes: made before the slow tests (`make runtimes`), found here, and never made by a test."""

import os

import pytest

from enginehouse.plugin import plugins
from enginehouse.runtimes import Interpreter, NoRuntime, choose_runtime


@pytest.fixture(scope="session")
def vllm_runtime() -> Interpreter:
    """The interpreter of vLLM's runtime."""
    return _runtime_of("vllm")


@pytest.fixture(scope="session")
def sglang_runtime() -> Interpreter:
    """The interpreter of SGLang's runtime."""
    return _runtime_of("sglang")


def _runtime_of(backend: str) -> Interpreter:
    record = plugins().get("rollout", backend, elsewhere=True)
    try:
        return choose_runtime(record)
    except NoRuntime as error:
        if os.environ.get("ENGINEHOUSE_TESTS_MUST_RUN"):
            pytest.fail(str(error))
        pytest.skip(str(error))
