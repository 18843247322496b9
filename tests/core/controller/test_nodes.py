"""Groups over several nodes, unequal ones, and ones that leave: two real Ray nodes on this machine."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from controller_workers import Accumulator, Leaver, Reducer, Surroundings, Trouble
from ray.util import placement_group_table
from ray_programs import ClusterProgram, add_node, kill_node

from enginehouse.controller import (
    ControllerError,
    GroupClosed,
    PlacementError,
    ResourcePool,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    colocate,
    merge_resource_pools,
)
from enginehouse.controller.launchers.node_paths import check_nodes, name_missing_start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    """A program on a cluster of two nodes, of four and of two processes of one CPU and one (logical) GPU."""
    program = ClusterProgram({"num_cpus": 4, "num_gpus": 4}, {"num_cpus": 2, "num_gpus": 2})
    yield program
    program.end()


@pytest.mark.parametrize("sizes", [pytest.param([4, 2], marks=pytest.mark.essential), [2, 4]])
def test_unequal_nodes_get_unequal_parts_of_a_group_and_meet(cluster, sizes):
    seen = cluster.run(_meet, sizes)
    assert seen["sums"] == [21] * 6
    assert [(local, of) for *_, local, of in seen["places"]] == [(n, size) for size in sizes for n in range(size)]
    assert [(rank, size) for rank, size, *_ in seen["places"]] == [(rank, 6) for rank in range(6)]
    assert {address for address, _ in seen["meeting points"]} == {seen["address of rank 0"]}
    assert len(set(seen["meeting points"])) == 1


def _meet(sizes):
    pool = ResourcePool(sizes)
    sees = WorkerSpec(Surroundings)
    groups = colocate(pool, {"sum": WorkerSpec(Reducer), "sees": sees}, timeout=120)
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    environ = groups["sees"].execute_all("environ", names)
    seen = {
        "sums": groups["sum"].sum_of_ranks(),
        "places": [tuple(map(int, values[:4])) for values in environ],
        "meeting points": [(values[4], values[5]) for values in environ],
        "address of rank 0": groups["sum"].nodes[0],
    }
    for group in groups.values():
        group.shutdown()
    pool.shutdown()
    return seen


def test_ranks_of_a_node_see_gpus_of_their_own_and_groups_on_one_place_share_one(cluster):
    seen = cluster.run(_gpus)
    assert sorted(seen["first"][:4]) == ["0", "1", "2", "3"]
    assert sorted(seen["first"][4:]) == ["0", "1"]
    assert seen["second"] == seen["first"]
    assert [devices.count(",") for devices in seen["two each"]] == [1, 1]


def _gpus():
    pool = ResourcePool([4, 2], gpus_per_process=1, cpus_per_process=0.25, max_colocate=3)
    groups = {name: _surroundings(pool, name) for name in ("first", "second")}
    seen = {name: _visible_gpus(group) for name, group in groups.items()}
    for group in groups.values():
        group.shutdown()
    pool.shutdown()
    pool = ResourcePool([2], gpus_per_process=2, cpus_per_process=0.25)
    with _surroundings(pool, "two") as group:
        seen["two each"] = _visible_gpus(group)
    pool.shutdown()
    return seen


def _visible_gpus(group):
    return [values[0] for values in group.execute_all("environ", ["CUDA_VISIBLE_DEVICES"])]


def _surroundings(pool, name):
    return WorkerGroup(pool, WorkerSpec(Surroundings).options(distributed=False), name=name, timeout=120)


def test_a_group_over_pools_on_several_nodes_counts_its_local_ranks(cluster):
    places = cluster.run(_merged)
    assert places == [("0", "2"), ("1", "2"), ("0", "4"), ("1", "4"), ("2", "4"), ("3", "4")]


def _merged():
    large, small = ResourcePool([4]), ResourcePool([2])
    with _surroundings(merge_resource_pools(small, large), "both") as group:
        places = group.execute_all("environ", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
    large.shutdown()
    small.shutdown()
    return [tuple(values) for values in places]


def test_what_the_nodes_cannot_give_is_refused_by_the_deadline_with_what_each_has(cluster):
    said = cluster.run(_refusal, [4, 3])
    assert "not placed within 15 s: pool 'large' asks for 4 processes on one node and 3 processes on one node" in said
    assert "1 CPU each; of these 3 processes on one node could not be placed" in said
    assert "The cluster has 2 node(s)" in said
    for part in (": 4 CPU, 4 GPU, of which free: ", ": 2 CPU, 2 GPU, of which free: 2 CPU, 2 GPU", "free now: 2 CPU"):
        assert part in said


def _refusal(sizes):
    try:
        WorkerGroup(ResourcePool(sizes, name="large", timeout=15), WorkerSpec(Trouble))
    except PlacementError as error:
        return str(error)


def test_workers_on_another_node_take_what_they_started_along(cluster, tmp_path):
    pids, alive = cluster.run(_families, str(tmp_path / "note"))
    assert len(set(pids)) == 12
    assert alive == []
    assert sorted((tmp_path / "note").read_text().splitlines()) == [f"rank {rank} left" for rank in range(6)]


def _families(note):
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, WorkerSpec(Leaver, note).options(distributed=False), timeout=120) as group:
        pids = [*group.pids, *group.execute_all("start_child")]
    alive = [pid for pid in pids if _runs(pid)]
    pool.shutdown()
    return pids, alive


def test_a_node_that_leaves_during_a_call_is_a_death_and_its_ranks_come_back_elsewhere(cluster):
    seen = cluster.run(_leave_during_a_call)
    rank, pid, node, said = seen["died"]
    assert rank in (4, 5), "the ranks of the node that left"
    assert (pid, node) == (seen["pids"][rank], seen["addresses"][rank])
    assert f"rank {rank} (node {node}, pid {pid}): the process died during 'hang'" in said
    assert f"rank {rank} " in seen["refused"]
    assert "2 processes on one node could not be placed" in seen["nowhere to go"]
    assert "its restart failed: not placed within 1 s" in seen["refused then"]
    assert seen["ranks"] == list(range(6))
    assert not set(seen["new pids"]) & set(seen["pids"])
    assert seen["alive"] == []


def _leave_during_a_call():
    pool = ResourcePool([4, 2])
    group = WorkerGroup(pool, WorkerSpec(Trouble).options(distributed=False), name="six", timeout=120)
    seen = {"pids": group.pids, "addresses": group.nodes}
    call = group.execute_all_async("hang")
    kill_node(_small_node())
    try:
        call.result()
    except WorkerDied as error:
        seen["died"] = (error.rank, error.pid, error.node, str(error))
    seen["refused"] = _said(GroupClosed, group.fine)
    pool.timeout = 1
    seen["nowhere to go"] = _said(PlacementError, group.restart)
    seen["refused then"] = _said(GroupClosed, group.fine)
    add_node(num_cpus=2, num_gpus=2)
    pool.timeout = 60
    group.restart()
    seen["ranks"] = group.fine()
    seen["new pids"] = group.pids
    seen["alive"] = [pid for pid in seen["pids"] if _runs(pid)]
    group.shutdown()
    pool.shutdown()
    return seen


def test_a_node_that_leaves_between_calls_is_a_death_in_the_next(cluster):
    rank, method, said = cluster.run(_leave_between_calls)
    assert rank in (4, 5)
    assert method == "fine"
    assert f"six rank {rank} " in said


def _leave_between_calls():
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, WorkerSpec(Trouble).options(distributed=False), name="six", timeout=120) as group:
        assert group.fine() == list(range(6))
        kill_node(_small_node(), and_wait=True)
        try:
            group.fine()
        except WorkerDied as error:
            found = (error.rank, error.method, str(error))
    pool.shutdown()
    add_node(num_cpus=2, num_gpus=2)
    return found


def test_a_hang_while_a_node_has_left_is_blamed_on_the_node(cluster):
    rank, said = cluster.run(_hang_beside_a_loss)
    assert rank in (4, 5)
    assert "died during 'hang_on': its node has died" in said


def _hang_beside_a_loss():
    """Rank 0 hangs; the others have ended their part of the call when two of them leave with their node."""
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, WorkerSpec(Trouble).options(distributed=False), name="six", timeout=120) as group:
        call = group.call("hang_on", 0, timeout=20, blocking=False)
        kill_node(_small_node(), and_wait=True)
        try:
            call.result()
        except WorkerDied as error:
            found = (error.rank, str(error))
    pool.shutdown()
    add_node(num_cpus=2, num_gpus=2)
    return found


def test_a_call_that_ended_is_had_after_its_deadline_though_its_outputs_lie_on_another_node(cluster):
    assert cluster.run(_ask_late) == ([1_000_000] * 6, None)


def _ask_late():
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, WorkerSpec(Accumulator).options(distributed=False), name="six", timeout=120) as group:
        future = group.call("add", np.zeros(1_000_000, np.uint8), timeout=0.001, blocking=False)
        group.first()  # behind it on every rank: then it has ended, and its deadline has passed
        found = [output.size for output in future.result()], group.broken
    pool.shutdown()
    return found


def test_a_death_on_another_node_is_found_beside_a_rank_that_does_not_answer(cluster):
    rank, said = cluster.run(_die_beside_a_stopped_one)
    assert rank == 5
    assert "died during 'fine'" in said


def _die_beside_a_stopped_one():
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, WorkerSpec(Trouble).options(distributed=False), name="six", timeout=120) as group:
        os.kill(group.pids[4], signal.SIGSTOP)
        os.kill(group.pids[5], signal.SIGKILL)
        try:
            group.fine()
        except WorkerDied as error:
            found = (error.rank, str(error))
    pool.shutdown()
    return found


def _small_node():
    import ray

    return next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU") == 2)


def _said(kind, call):
    try:
        call()
    except kind as error:
        return str(error)


def _runs(pid):
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_small_part_of_a_pool_never_takes_the_place_its_large_part_waits_for(cluster):
    assert cluster.run(_placed_while_the_large_node_is_in_use) == ["4"] * 4 + ["2"] * 2


def _placed_while_the_large_node_is_in_use():
    """Ask for both nodes while one GPU of the large one is in use, which is let go once the large part waits for it."""
    few = {"gpus_per_process": 1, "cpus_per_process": 0.1}
    pools = [ResourcePool([count], **few) for count in (3, 2, 1)]  # on the large node, on the small one, on the large
    groups = [_surroundings(pool, f"of {pool.world_size}") for pool in pools]
    for pool, group in zip(pools[:2], groups):
        group.shutdown()
        pool.shutdown()
    both = ResourcePool([4, 2], **few)
    with ThreadPoolExecutor(1) as placing:
        placed = placing.submit(_surroundings, both, "both")
        while not any(len(one["bundles"]) == 4 and one["state"] == "PENDING" for one in _placement_groups()):
            assert not placed.done()
        groups[-1].shutdown()
        pools[-1].shutdown()
        with placed.result() as group:
            sizes = [values[0] for values in group.execute_all("environ", ["LOCAL_WORLD_SIZE"])]
    both.shutdown()
    return sizes


def _placement_groups():
    return placement_group_table().values()


def test_a_node_without_what_its_workers_are_started_from_is_named_at_once(cluster):
    other, own = cluster.run(_start_from_nowhere)
    for said in (other, own):
        assert "has no /nowhere/bin/python, but its workers are started from this path" in said
        assert "at the same paths: share " in said
    assert other.startswith("other: node ")
    assert own.startswith("own: node ")


def _start_from_nowhere():
    import ray

    here = ray.get_runtime_context().get_node_id()
    elsewhere = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    check_nodes("other", elsewhere, (sys.executable,), name_missing_start)
    spec = WorkerSpec(Surroundings).options(python="/nowhere/bin/python", distributed=False)
    return (
        _said(
            ControllerError,
            lambda: check_nodes("other", elsewhere, (sys.executable, "/nowhere/bin/python"), name_missing_start),
        ),
        _said(ControllerError, lambda: WorkerGroup(ResourcePool([1]), spec, name="own")),
    )


def test_a_node_without_a_model_is_named_before_a_worker_starts_there(cluster, tmp_path):
    (tmp_path / "config.json").touch()
    said, ranks = cluster.run(_read_what_one_node_has, str(tmp_path))
    assert said.startswith("six: node ")
    assert "has no /proc/self/task/" in said
    assert ", but its workers read this path. Every node needs every model at the same path: " in said
    assert "\n" not in said
    assert ranks == 6


def _read_what_one_node_has(held):
    """Start a group that reads what only this process has, and one that reads what is everywhere."""
    only_here = f"/proc/self/task/{os.getpid()}"
    spec = WorkerSpec(Surroundings).options(distributed=False)
    pool = ResourcePool([4, 2])
    said = _said(ControllerError, lambda: WorkerGroup(pool, spec.options(reads=[held, only_here]), name="six"))
    pool.shutdown()
    pool = ResourcePool([4, 2])
    with WorkerGroup(pool, spec.options(reads=[held, "/nowhere"]), name="six", timeout=120) as group:
        ranks = group.world_size
    pool.shutdown()
    return said, ranks
