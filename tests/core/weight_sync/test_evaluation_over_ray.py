"""Weights for an engine of its own for validations: what the rollout serves, verified, and nothing in its way."""

from __future__ import annotations

import pytest

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, colocate
from enginehouse.controller.weight_sync import WeightSync
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec
from enginehouse.engines.weights import WeightSyncError
from enginehouse.rl.fleet import RolloutFleet
from enginehouse.rl.roles import RolloutWorker, TrainWorker
from enginehouse.testing.models import tiny_model

from .roles_for_tests import DEMONSTRATIONS, PROBE, PROMPTS, SMALL_BUCKETS

pytestmark = pytest.mark.slow
PATIENCE = 120.0
SAMPLING = SamplingParams(n=1, max_tokens=6)


@pytest.fixture(params=["colocated", "separate"])
def house(request, ray_cluster):
    """An actor, a rollout in its process or beside it, and an engine for validations."""
    model = ModelSpec(tiny_model())
    pool = ResourcePool([1])
    rollout = WorkerSpec(RolloutWorker, "torch", model, {})
    specs = {"actor": WorkerSpec(TrainWorker, "torch", model, {"lr": 0.05})}
    apart = request.param == "separate"
    groups: dict[str, WorkerGroup] = colocate(pool, specs if apart else specs | {"rollout": rollout}, timeout=PATIENCE)
    given = {"timeout": PATIENCE, "start_timeout": PATIENCE, "health_every": 3600.0}
    replicas = RolloutFleet(rollout, 1, **given) if apart else groups["rollout"]
    replicas.launch()
    evaluation = RolloutFleet(rollout, 1, name="evaluation", **given)
    evaluation.launch()
    transport = "shared_memory" if apart else "inproc"
    sync = WeightSync(
        groups["actor"], replicas, transport, bucket_bytes=SMALL_BUCKETS, timeout=PATIENCE, probe=PROBE
    )  # fmt: skip
    sync.connect()
    yield groups["actor"], replicas, evaluation, sync
    sync.close()
    evaluation.shutdown()
    if apart:
        replicas.shutdown()
    for group in groups.values():
        group.shutdown()
    pool.shutdown()


def test_it_serves_what_the_rollout_serves_at_each_validation(house):
    actor, rollout, evaluation, sync = house
    with pytest.raises(WeightSyncError, match="no version to bring to evaluation"):
        sync.bring(evaluation, "shared_memory")
    for version in (1, 2, 4):
        actor.update(DEMONSTRATIONS, LossSpec("supervised"))
        sync.sync(version)
        sync.bring(evaluation, "shared_memory")
        (theirs,), (ours,) = rollout.weight_state(), evaluation.weight_state()
        assert (ours.version, ours.checksums) == (version, theirs.checksums)
        drawn, expected = (one.generate(PROMPTS, SAMPLING, seed=3) for one in (evaluation, rollout))
        assert drawn["input_ids"].values.tolist() == expected["input_ids"].values.tolist()
    sync.sync(5)
    assert [state.version for state in rollout.weight_state()] == [5]
    assert [state.version for state in evaluation.weight_state()] == [4]


def test_it_gets_nothing_once_the_trainer_has_gone_on(house):
    actor, _, evaluation, sync = house
    sync.sync(1)
    sync.bring(evaluation, "shared_memory")
    actor.update(DEMONSTRATIONS, LossSpec("supervised"))
    with pytest.raises(WeightSyncError, match=r"could not be brought to evaluation|not those of version 1 any more"):
        sync.bring(evaluation, "shared_memory")
    sync.sync(2)
    sync.bring(evaluation, "shared_memory")
    assert [state.version for state in evaluation.weight_state()] == [2]
