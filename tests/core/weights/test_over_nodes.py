"""Weight updates between nodes of a cluster: two real Ray nodes on this machine."""

import os
from pathlib import Path

import pytest
from ray_programs import ClusterProgram

from enginehouse.controller import register
from enginehouse.roles.workers import RolloutWorker, TrainWorker

from .roles_for_tests import PROBE, open_house

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
ENV = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "core"))), "OMP_NUM_THREADS": "1"}


class Placed:
    """A worker that says where it is."""

    @register
    def ray_node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


class PlacedTrainWorker(Placed, TrainWorker):
    pass


class PlacedRolloutWorker(Placed, RolloutWorker):
    pass


def test_the_collective_transport_brings_verified_weights_to_a_replica_on_another_node(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "core")  # the program imports this module
    program = ClusterProgram({"num_cpus": 1}, {"num_cpus": 1})
    try:
        seen = program.run(_update)
    finally:
        program.end()
    assert len(seen["nodes"]) == 2
    assert seen["effects"] == [pytest.approx(0, abs=1e-4)] * 2
    assert seen["versions"] == [[1], [2]]
    assert seen["changed"] > 1e-3


def _update():
    placed = {"train": PlacedTrainWorker, "rollout": PlacedRolloutWorker, "env": ENV}
    with open_house("collective", launcher="ray", processes=1, replicas=1, **placed) as house:
        seen = {"nodes": {*house.actor.ray_node(), *house.rollout.ray_node()}, "effects": [], "versions": []}
        sync = house.connect(effect_check_every=1)
        before = house.rollout.score(PROBE)[0]
        for version in (1, 2):
            house.train()
            seen["effects"].append(sync.publish(version).effect)
            seen["versions"].append(house.versions())
        seen["changed"] = abs(house.rollout.score(PROBE)[0][0][1] - before[0][1])
        return seen
