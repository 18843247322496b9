"""Fixtures of the vllm backend's tests: a worker process under the interpreter of its runtime."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SECONDS = 300.0
"""Longest any call may take, an engine's launch included."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(
            Path(__file__).parent
        ):  # a launch alone may take a minute; deadlines inside speak first
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def runtime():
    """The interpreter that vLLM runs under, and the environment of its workers."""
    from enginehouse.plugin import plugins
    from enginehouse.runtimes import choose_runtime

    return choose_runtime(
        plugins().get("rollout", "vllm", elsewhere=True), os.environ.get("ENGINEHOUSE_TEST_VLLM_RUNTIME", "auto")
    )


@pytest.fixture(scope="session")
def replica(ray_cluster, runtime):
    """Call it for a worker process that holds a `VLLMReplica`, and that ends with the `with` statement."""

    @contextlib.contextmanager
    def started() -> Iterator:
        from vllm_acts import VLLMReplica

        from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec

        spec = WorkerSpec(VLLMReplica).options(python=runtime.python, env=dict(runtime.env), distributed=False)
        pool = ResourcePool([1])
        try:
            with WorkerGroup(pool, spec, name="vllm", timeout=SECONDS) as group:
                yield group
        finally:
            pool.shutdown()

    return started
