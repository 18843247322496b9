"""Who sees which GPU where roles share some, and how roles lie over nodes: two real Ray nodes of eight logical GPUs.

The scenarios are those of one GPU, of eight, and of two nodes. No process here touches a GPU.
"""

import pytest
from controller_workers import Surroundings
from ray_programs import ClusterProgram

from enginehouse.controller import ControllerError, PlacementError, ResourcePool, WorkerGroup, WorkerSpec
from enginehouse.controller.launchers.host import LEFT_AS_THEY_ARE
from enginehouse.controller.placement_group import Room, count_gpus

pytestmark = pytest.mark.slow

NODE = {"num_cpus": 20, "num_gpus": 8}


@pytest.fixture(scope="module")
def cluster():
    program = ClusterProgram(NODE, NODE)
    yield program
    program.end()


def _group(pool, name):
    return WorkerGroup(pool, WorkerSpec(Surroundings).options(distributed=False), name=name, timeout=120)


def _seen(group):
    """Of each rank, its node and the GPUs that it sees."""
    visible = [values[0] for values in group.execute_all("environ", ["CUDA_VISIBLE_DEVICES"])]
    return list(zip([node_of(group, rank) for rank in range(group.world_size)], visible, strict=True))


def node_of(group, rank):
    return group._processes._facts[rank].node_id  # the nodes of these tests have one address


def _pool(room, processes, gpus, guests=0):
    return ResourcePool(room.take(processes, gpus), gpus_per_process=gpus, guests=guests, cpus_per_process=0.5)


def _shared(ranks, each, replicas, restarts):
    """What actor and replicas see at first; with restarts also after those of the replicas, and of all."""
    pool = _pool(Room.of_cluster(), ranks, 1, guests=1)
    actor = _group(pool, "actor")
    fleet = [_group(place, f"rollout-{number}") for number, place in enumerate(pool.guests(each, replicas))]
    seen = []
    for again in ([], fleet, [actor, *fleet]) if restarts else ([],):
        for group in again:
            group.restart()
        seen.append((_seen(actor), [_seen(replica)[0] for replica in fleet]))
    for group in (actor, *fleet):
        group.shutdown()
    pool.shutdown()
    return seen


@pytest.mark.parametrize(
    ("ranks", "each", "replicas", "restarts"),
    [
        pytest.param(1, 1, 1, True, marks=pytest.mark.essential, id="a2: one GPU"),
        pytest.param(4, 2, 2, True, id="b2: split by two"),
        pytest.param(8, 8, 1, False, id="split by eight"),
        pytest.param(10, 2, 5, False, id="c2: two nodes"),
    ],
)
def test_a_replica_sees_the_gpus_of_the_ranks_beside_it_also_after_restarts(cluster, ranks, each, replicas, restarts):
    for actor, fleet in cluster.run(_shared, ranks, each, replicas, restarts):
        assert len(set(actor)) == ranks  # each rank a GPU of its own
        assert all("," not in visible and visible for _, visible in actor)
        for node in dict(actor):
            numbers = [int(visible) for there, visible in actor if there == node]
            assert numbers == sorted(numbers)  # neighbours in rank are neighbours in the machine
        for number, (node, visible) in enumerate(fleet):
            beside = actor[number * each : (number + 1) * each]
            assert {node} == {there for there, _ in beside}
            assert visible.split(",") == [device for _, device in beside]


def _apart(actor_ranks, each, replicas):
    room = Room.of_cluster()
    actor_pool, rollout_pool = _pool(room, actor_ranks, 1), _pool(room, replicas, each)
    actor = _group(actor_pool, "actor")
    fleet = [_group(place, f"rollout-{number}") for number, place in enumerate(rollout_pool.split(replicas))]
    seen = _seen(actor), [_seen(replica)[0] for replica in fleet]
    for group in (actor, *fleet):
        group.shutdown()
    actor_pool.shutdown()
    rollout_pool.shutdown()
    return seen


@pytest.mark.parametrize(
    ("ranks", "each", "replicas"), [(4, 2, 2), (8, 4, 2)], ids=["b1: eight GPUs", "c1: a node each"]
)
def test_roles_apart_have_gpus_of_their_own(cluster, ranks, each, replicas):
    actor, fleet = cluster.run(_apart, ranks, each, replicas)
    held = [*actor, *((node, device) for node, visible in fleet for device in visible.split(","))]
    assert len(set(held)) == ranks + each * replicas


def _left_alone():
    spec = WorkerSpec(Surroundings).options(distributed=False, env={LEFT_AS_THEY_ARE: "1"})
    with WorkerGroup(_pool(Room.of_cluster(), 2, 2), spec, name="left", timeout=120) as group:
        return _seen(group)


def test_a_process_sees_its_own_gpus_also_where_ray_is_told_to_leave_that_alone(cluster):
    seen = [visible.split(",") for _, visible in cluster.run(_left_alone)]
    assert [len(each) for each in seen] == [2, 2]
    assert not set(seen[0]) & set(seen[1])


def _refused():
    said = []
    for asked in [(17, 1), (1, 9)]:
        try:
            Room.of_cluster().take(*asked)
        except PlacementError as error:
            said.append(str(error))
    try:
        _pool(Room.of_cluster(), 8, 1, guests=1).guests(3, 3)
    except ControllerError as error:
        said.append(str(error))
    with _group(ResourcePool([1]), "none") as group:
        return said, _seen(group), count_gpus()


@pytest.mark.essential
def test_what_cannot_be_placed_is_said_at_once(cluster):
    (too_many, too_large, too_few), ((_, visible),), gpus = cluster.run(_refused)
    assert gpus == 16
    assert "not large enough for 17 processes that each need 1 CPU, 1 GPU on one node: " in too_many
    assert "it has room for 16 of them. The cluster has 2 node(s)" in too_many
    assert "for 1 processes that each need 1 CPU, 9 GPU on one node: " in too_large
    assert "not enough for 3 guests that each use the GPUs of 3 processes on one node" in too_few
    assert visible == ""  # a process without a GPU sees none
