"""Who sits where: pools that share places, and what the cluster gets back."""

import gc

import pytest
import ray
from controller_workers import Accumulator, Trouble

from enginehouse.controller import (
    ControllerError,
    PlacementError,
    ResourcePool,
    WorkerGroup,
    WorkerSpec,
    merge_resource_pools,
)

pytestmark = pytest.mark.slow  # a start of processes or more a test


@pytest.fixture
def closing(ray_cluster):
    """Shut down at the end what a test made, groups before pools."""
    made = []

    def close(thing):
        made.append(thing)
        return thing

    yield close
    for thing in sorted(made, key=lambda thing: isinstance(thing, ResourcePool)):
        thing.shutdown()


def _accumulators(pool: ResourcePool, name: str) -> WorkerGroup:
    return WorkerGroup(pool, WorkerSpec(Accumulator).options(distributed=False), name=name, timeout=60)


def test_groups_on_two_pools_and_on_both_merged_run_side_by_side(closing):
    first, second = (
        closing(ResourcePool([2], cpus_per_process=0.25, max_colocate=2, name=name)) for name in ("a", "b")
    )
    both = merge_resource_pools(first, second)
    assert (both.name, both.processes_per_node, both.world_size) == ("a+b", (2, 2), 4)
    pools = {"one": first, "two": second, "all": both}
    groups = {name: closing(_accumulators(pool, name)) for name, pool in pools.items()}
    assert [group.add_own(list(range(group.world_size))) for group in groups.values()] == [[0, 1], [0, 1], [0, 1, 2, 3]]
    assert [pool.groups for pool in pools.values()] == [["one", "all"], ["two", "all"], ["one", "all", "two"]]

    with pytest.raises(PlacementError, match=r"'b' can hold 2 group\(s\) at once, but already has all, two;.*'fourth'"):
        _accumulators(second, "fourth")
    with pytest.raises(PlacementError, match=r"'a\+b' can hold 2 .* has all, one, two;"):
        _accumulators(both, "fourth")
    groups["one"].shutdown()
    with pytest.raises(PlacementError, match=r"has all, two on 2 of its 4 places"):
        _accumulators(both, "fourth")
    groups["two"].shutdown()
    assert closing(_accumulators(both, "again")).add(1) == [1, 1, 1, 1]


def test_a_merged_pool_uses_the_places_of_its_parts_in_order(closing):
    first, second = (closing(ResourcePool([size], cpus_per_process=0.25, max_colocate=2)) for size in (2, 1))
    merged = merge_resource_pools(second, first).lease("all")
    assert merged.slots == second.lease("two").slots + first.lease("one").slots
    assert len({(slot.placement_group.id, slot.bundle) for slot in merged.slots}) == 3


def test_a_split_pool_gives_its_places_to_groups_side_by_side(closing):
    pool = closing(ResourcePool([4, 2], cpus_per_process=0.25, name="six"))
    left, right = pool.split([3, 3])
    assert [left.processes_per_node, right.processes_per_node] == [(3,), (1, 2)]
    assert [part.processes_per_node for part in pool.split(2)] == [(3,), (1, 2)]
    assert [part.name for part in pool.split(3)] == ["six[0:2]", "six[2:4]", "six[4:6]"]
    group = closing(_accumulators(left, "left"))
    with pytest.raises(PlacementError, match="has left on 3 of its 6 places"):
        pool.lease("whole")
    other = closing(_accumulators(right, "right"))
    assert (group.add(1), other.add(2)) == ([1, 1, 1], [2, 2, 2])
    with pytest.raises(PlacementError, match="has left, right"):
        pool.lease("whole")
    assert merge_resource_pools(left, right).processes_per_node == (3, 1, 2)


def test_what_a_pool_reserved_stays_while_a_part_of_it_is_held(ray_cluster):
    most = int(ray.available_resources()["CPU"]) // 2
    pool = ResourcePool([2], cpus_per_process=most, timeout=20)
    parts = pool.split(2)
    parts[0].lease("part")
    del pool
    gc.collect()
    with pytest.raises(PlacementError, match="not placed within"):
        ResourcePool([2], cpus_per_process=most, timeout=0.5).lease("other")
    parts[1].shutdown()
    del parts
    gc.collect()
    other = ResourcePool([2], cpus_per_process=most, timeout=20)
    other.lease("other")
    other.shutdown()


def test_a_pool_that_was_split_off_and_shut_down_leaves_the_others_alone(closing):
    pool = closing(ResourcePool([2], cpus_per_process=0.25))
    left, right = pool.split(2)
    group = closing(_accumulators(left, "left"))
    right.shutdown()
    assert group.add(1) == [1]
    with pytest.raises(ControllerError, match="was shut down"):
        right.lease("late")


def test_a_pool_can_be_used_again_after_its_shutdown(closing):
    pool = closing(ResourcePool([2], cpus_per_process=0.25))
    with _accumulators(pool, "first") as group:
        assert group.add(1) == [1, 1]
    pool.shutdown()
    with _accumulators(pool, "second") as group:
        assert group.add(2) == [2, 2]


def test_a_group_restarted_after_the_shutdown_of_its_pool_has_its_place_again(closing):
    pool = closing(ResourcePool([1], cpus_per_process=0.25, name="p"))
    group = closing(_accumulators(pool, "first"))
    pool.shutdown()
    assert pool.groups == []
    group.restart()
    assert pool.groups == ["first"]
    with pytest.raises(PlacementError, match=r"'p' can hold 1 .* has first;.*'second'"):
        _accumulators(pool, "second")
    assert group.add(1) == [1]


def test_a_group_whose_place_was_taken_after_the_shutdown_of_its_pool_cannot_be_restarted(closing):
    pool = closing(ResourcePool([1], cpus_per_process=0.25, name="p"))
    first = closing(_accumulators(pool, "first"))
    pool.shutdown()
    second = closing(_accumulators(pool, "second"))
    with pytest.raises(PlacementError, match=r"'p' can hold 1 .* has second;.*'first'"):
        first.restart()
    assert second.add(1) == [1]
    second.shutdown()
    first.restart()
    assert first.add(2) == [2]


def test_a_group_that_is_dropped_frees_its_place(closing):
    pool = closing(ResourcePool([1], cpus_per_process=0.25))
    group = _accumulators(pool, "first")
    assert group.add(1) == [1]
    del group
    gc.collect()
    assert pool.groups == []
    assert closing(_accumulators(pool, "second")).add(2) == [2]


def test_a_pool_takes_the_place_of_one_that_only_itself_refers_to(closing):
    forgotten = ResourcePool([1], cpus_per_process=9, name="forgotten")
    forgotten.lease("group")
    forgotten.itself = forgotten  # in a cycle, as a pool is that an error's traceback refers to
    gc.disable()
    try:
        del forgotten
        closing(ResourcePool([1], cpus_per_process=9, name="next", timeout=20)).lease("group")
    finally:
        gc.enable()


def test_a_group_that_cannot_be_built_gives_its_place_back(closing):
    pool = closing(ResourcePool([1], cpus_per_process=0.25))
    with pytest.raises(ControllerError, match="no such thing"):
        WorkerGroup(pool, WorkerSpec(Trouble, "no such thing").options(distributed=False))
    assert pool.groups == []


def test_what_one_machine_can_never_hold_is_refused_at_once(ray_cluster):
    with pytest.raises(PlacementError, match=r"not large enough: .* 9 processes on one node and 9 processes.*16 CPU"):
        ResourcePool([9, 9], timeout=3600).lease("large")


def test_places_that_do_not_fit_together_are_refused():
    pool = ResourcePool([2], name="p")
    with pytest.raises(ControllerError, match="some of their places are the same"):
        merge_resource_pools(pool, pool.split(2)[0])
    with pytest.raises(ControllerError, match=r"'p' and 'q' cannot be merged: cpus_per_process is 1 and 2"):
        merge_resource_pools(pool, ResourcePool([2], cpus_per_process=2, name="q"))
    with pytest.raises(ControllerError, match="2 processes cannot be split into 3 equal parts"):
        pool.split(3)
    with pytest.raises(ControllerError, match=r"add up to 2"):
        pool.split([1, 2])


@pytest.mark.parametrize(("gpus", "max_colocate"), [(1.5, 1), (1.5, 2), (3, 2), (3, 4)])
def test_shares_of_gpus_that_ray_cannot_give_are_refused(gpus, max_colocate):
    with pytest.raises(ControllerError, match=f"{gpus / max_colocate:g} GPUs"):
        ResourcePool([1], gpus_per_process=gpus, max_colocate=max_colocate)


@pytest.mark.parametrize(("gpus", "max_colocate"), [(0.5, 3), (1, 6), (2, 2), (2, 4), (4, 2), (8, 1)])
def test_shares_of_gpus_that_ray_can_give_are_taken(gpus, max_colocate):
    assert ResourcePool([1], gpus_per_process=gpus, max_colocate=max_colocate).bundle["GPU"] == gpus
