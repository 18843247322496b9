"""Fixtures of the vllm backend's tests: a worker process under the interpreter of its runtime."""

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
    from replica_processes import runtime_of

    return runtime_of("vllm")


@pytest.fixture(scope="session")
def replica(ray_cluster, runtime):
    """Call it for a worker process that holds a `VLLMReplica`, and that ends with the `with` statement."""
    from replica_processes import replica_process
    from vllm_acts import VLLMReplica

    return lambda: replica_process(VLLMReplica, runtime, "vllm", SECONDS)
