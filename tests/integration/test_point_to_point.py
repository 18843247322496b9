"""Weights from the ranks that hold parts of them straight to rollout replicas, between real engines over Ray."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
from enginehouse.controller.weight_sync import WeightSync
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.train import LossSpec
from enginehouse.engines.weights import checksum
from enginehouse.rl.roles import RolloutWorker, TrainWorker
from enginehouse.testing.checks.train.weights import stored_tensors
from enginehouse.testing.models import tiny_model

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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_replicas_serve_bit_for_bit_what_the_trainer_exports(layout, replicas, tmp_path):
    backend, processes, options = layout
    spec = WorkerSpec(TrainWorker, backend, ModelSpec(tiny_model()), {"lr": 0.05, **options})
    newest = max(state.version for state in replicas.weight_state())
    with ExitStack() as stack:
        pool = ResourcePool([processes])
        stack.callback(pool.shutdown)
        actor = stack.enter_context(WorkerGroup(pool, spec, name="actor", timeout=PATIENCE, start_timeout=PATIENCE))
        sync = WeightSync(actor, replicas, "point_to_point", bucket_bytes=SMALL_BUCKETS, timeout=PATIENCE, probe=PROBE)
        sync.connect()
        stack.callback(sync.close)
        for version in (newest + 1, newest + 2):
            actor.update(DEMONSTRATIONS, LossSpec("supervised"))
            report = sync.sync(version)
        assert report.bytes_minimum == 2 * report.nbytes
        assert report.bytes_moved < 2 * report.nbytes + 2 * 200 * 32, "a heading of 32 bytes for each part, no more"
        actor.export_hf(str(tmp_path))
    served = replicas.weight_state()
    exported = stored_tensors(str(tmp_path))
    assert [state.version for state in served] == [newest + 2] * 2
    for state in served:
        assert state.checksums == {name: checksum(tensor) for name, tensor in exported.items()}
    assert not torch.equal(*(stored_tensors(one)["model.norm.weight"] for one in (str(tmp_path), tiny_model())))
