"""Weights from the ranks that hold parts of them straight to rollout replicas, between real engines over Ray."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import LossSpec
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.plugin import plugins
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.runtimes import choose_runtime
from enginehouse.weights.checksums import checksum
from enginehouse.weights.sync import WeightSync
from enginehouse_testing.models import stored_tensors, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROBE = [[3, 4, 5, 6, 7], [8, 9, 10]]
PATIENCE = 300.0
SMALL_BUCKETS = 4096  # bytes: several even for a tiny model
ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12], [5, 5, 5, 5]]
DEMONSTRATIONS = Batch(
    {
        "input_ids": Ragged.from_list(ROWS),
        "loss_mask": Ragged.from_list([[False] + [True] * (len(row) - 1) for row in ROWS]),
    }
)
LAYOUTS = {
    "megatron tp2 x pp2": ("megatron", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "fsdp shard2": ("fsdp", 2, {}),
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with start_ray() as started:
        yield started


@pytest.fixture(scope="module")
def replicas():
    """Two replicas, each in a process of its own."""
    pool = ResourcePool([2])
    spec = WorkerSpec(RolloutWorker, "torch", ModelSpec(tiny_model()), {}).options(distributed=False)
    with WorkerGroup(pool, spec, name="rollout", timeout=PATIENCE, start_timeout=PATIENCE) as group:
        group.launch()
        yield group
    pool.shutdown()


@contextmanager
def trained(
    layout, model, replicas, transport="point_to_point", tolerance=0.05
) -> Iterator[tuple[WorkerGroup, WeightSync]]:
    """A trainer of some layout, connected to replicas."""
    backend, processes, options = layout
    spec = WorkerSpec(TrainWorker, backend, model, {"lr": 0.05, **options})
    with ExitStack() as stack:
        pool = ResourcePool([processes])
        stack.callback(pool.shutdown)
        actor = stack.enter_context(WorkerGroup(pool, spec, name="actor", timeout=PATIENCE, start_timeout=PATIENCE))
        sync = WeightSync(
            actor,
            RolloutFleet.from_group(replicas),
            transport,
            bucket_bytes=SMALL_BUCKETS,
            timeout=PATIENCE,
            effect_check_every=1,
            effect_tolerance=tolerance,
            probe=PROBE,
        )
        sync.connect()
        stack.callback(sync.close)
        yield actor, sync


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_replicas_serve_bit_for_bit_what_the_trainer_exports(layout, replicas, tmp_path):
    newest = max(state.version for state in replicas.weight_state())
    with trained(layout, ModelSpec(tiny_model()), replicas) as (actor, sync):
        for version in (newest + 1, newest + 2):
            actor.update(DEMONSTRATIONS, LossSpec("supervised"))
            report = sync.publish(version)
        assert report.bytes_minimum == 2 * report.nbytes
        assert report.bytes_moved < 2 * report.nbytes + 2 * 200 * 40, "a heading of 40 bytes for each part, no more"
        actor.export_hf(str(tmp_path))
    served = replicas.weight_state()
    exported = stored_tensors(str(tmp_path))
    assert [state.version for state in served] == [newest + 2] * 2
    for state in served:
        assert state.checksums == {name: checksum(tensor) for name, tensor in exported.items()}
    assert not torch.equal(*(stored_tensors(one)["model.norm.weight"] for one in (str(tmp_path), tiny_model())))


@contextmanager
def served_by(backend, model, count) -> Iterator[WorkerGroup]:
    """Replicas of an engine that has a runtime of its own."""
    record = plugins().get("rollout", backend, elsewhere=True)
    runtime = choose_runtime(record, os.environ.get(f"ENGINEHOUSE_TEST_{backend.upper()}_RUNTIME", "auto"))
    pool = ResourcePool([count])
    spec = WorkerSpec(RolloutWorker, backend, model, {"kv_cache_mib": 64}).options(
        python=runtime.python, env=dict(runtime.env), distributed=False
    )
    with WorkerGroup(pool, spec, name="rollout", timeout=PATIENCE, start_timeout=PATIENCE) as served:
        served.launch()
        yield served
    pool.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_replica_of_another_engine_computes_with_the_elements_that_changed(backend, tmp_path):
    model = ModelSpec(tiny_model(hidden=128), dtype="bfloat16")
    slow = ("fsdp", 2, {"lr": 1e-5})
    with served_by(backend, model, 1) as served, trained(slow, model, served, "differences", 0.2) as (actor, sync):
        sent, scores = [], []
        for version in range(1, 5):
            actor.update(DEMONSTRATIONS, LossSpec("supervised"))
            report = sync.publish(version)
            assert report.effect < 0.2
            sent.append(report.bytes_moved / report.nbytes)
            scores.append(served.score(PROBE))
        actor.export_hf(str(tmp_path))
        (state,) = served.weight_state()
    assert sent[0] > 1 > 2 * max(sent[1:])
    assert all(before != after for before, after in pairwise(scores))
    exported = stored_tensors(str(tmp_path))
    assert state.version == 4
    assert state.checksums.items() <= {name: checksum(tensor.bfloat16()) for name, tensor in exported.items()}.items()


@pytest.mark.exhaustive
def test_two_vllm_replicas_compute_what_four_ranks_split_by_matrices_and_layers_do():
    model = ModelSpec(tiny_model(hidden=128))
    with served_by("vllm", model, 2) as served:
        with trained(LAYOUTS["megatron tp2 x pp2"], model, served) as (actor, sync):
            before = served.score(PROBE)
            actor.update(DEMONSTRATIONS, LossSpec("supervised"))
            report = sync.publish(1)
            assert report.effect < 1e-3
            assert report.bytes_minimum == 2 * report.nbytes
            assert served.score(PROBE) != before
        assert [state.version for state in served.weight_state()] == [1, 1]
