"""What a pool reserves is given back, whatever Ray and other threads are at; Ray is a stand-in here."""

import threading
import time

import pytest
import ray

from enginehouse.controller import placement_group
from enginehouse.controller.errors import ClusterLost, PlacementError
from enginehouse.controller.placement_group import PlacementGroups
from enginehouse.controller.ray_access import RayAccess


class Group:
    """A placement group, one of two states: it is never placed, or is at once."""

    def __init__(self, state: str):
        self.state = state
        self.waited = threading.Event()

    def wait(self, timeout_seconds: float) -> bool:
        self.waited.set()
        return False


class Cluster:
    """Makes groups of one state, and keeps those that were removed."""

    def __init__(self) -> None:
        self.access = RayAccess()
        self.state = "CREATED"
        self.made: list[Group] = []
        self.removed: list[Group] = []

    def make(self, *bundles: object, **named: object) -> Group:
        self.made.append(Group(self.state))
        return self.made[-1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.placement_group", cluster.make)
    monkeypatch.setattr("ray.util.remove_placement_group", cluster.removed.append)
    monkeypatch.setattr(placement_group, "ray_access", cluster.access)
    monkeypatch.setattr(placement_group, "_state", lambda group: group.state)
    monkeypatch.setattr("enginehouse.controller.cluster.is_owned", lambda: False)
    return cluster


def place(reserved: PlacementGroups) -> bool:
    return reserved.place(time.monotonic() + 600.0, 600.0)


def failing(reserved: PlacementGroups) -> tuple[threading.Thread, list[Exception]]:
    """A thread that waits for places, and what it fails with."""
    errors: list[Exception] = []

    def wait() -> None:
        try:
            place(reserved)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("node_left", [True, False])
def test_giving_back_waits_for_nobody_who_waits_for_a_place(cluster: Cluster, node_left: bool):
    reserved = PlacementGroups("pool", [1], 1, 0, 1)
    if node_left:
        place(reserved)
        cluster.made[0].state = "RESCHEDULING"
    else:
        cluster.state = "PENDING"
    thread, errors = failing(reserved)
    while not cluster.made:
        pass
    cluster.made[0].waited.wait()
    reserved.give_back()
    thread.join()
    assert [type(error) for error in errors] == [PlacementError]
    assert "was shut down while a worker group waited for its places" in str(errors[0])
    assert set(cluster.removed) == set(cluster.made)
    assert not reserved.is_placed


def test_who_waits_for_a_place_leaves_ray_when_that_is_shut_down(cluster: Cluster):
    cluster.state = "PENDING"
    thread, errors = failing(PlacementGroups("pool", [1], 1, 0, 1))
    while not cluster.made:
        pass
    cluster.access.close()
    thread.join()
    assert [type(error) for error in errors] == [ClusterLost]


@pytest.mark.parametrize("again", [PlacementGroups.give_back, place])
def test_what_ray_did_not_take_back_is_given_back_later(cluster: Cluster, again):
    reserved, release = PlacementGroups("pool", [1], 1, 0, 1), threading.Event()
    assert place(reserved)
    cluster.access.end("hang", release.wait, seconds=0.01)
    (hung,) = [thread for thread in threading.enumerate() if thread.name == "ray-hang"]
    reserved.give_back()
    assert cluster.removed == []
    release.set()
    hung.join()
    again(reserved)
    assert cluster.removed == cluster.made[:1]


def test_a_placement_group_that_is_dropped_is_given_back(cluster: Cluster):
    place(PlacementGroups("pool", [1], 1, 0, 1))
    assert cluster.removed == cluster.made


@pytest.mark.parametrize(
    ("nodes", "owned", "expected"),
    [
        ([{"CPU": 192.0, "GPU": 8.0}], False, 24),
        ([{"CPU": 192.0, "GPU": 8.0}, {"CPU": 64.0}, {"CPU": 64.0, "GPU": 8.0}], False, 8),
        ([{"CPU": 2.0, "GPU": 8.0}], False, 1),
        ([{"CPU": 32.0, "GPU": 2.0}], True, 3),
    ],
    ids=["one node", "the node with the fewest counts", "one at least", "Ray was told of more than there are"],
)
def test_a_gpu_has_its_share_of_its_nodes_cores(monkeypatch: pytest.MonkeyPatch, nodes, owned: bool, expected: int):
    monkeypatch.setattr(placement_group, "_nodes", lambda: [{"Resources": node} for node in nodes])
    monkeypatch.setattr("enginehouse.controller.cluster.is_owned", lambda: owned)
    monkeypatch.setattr("enginehouse.controller.cluster.count_cores", lambda: 6)
    assert placement_group.cores_per_gpu() == expected
