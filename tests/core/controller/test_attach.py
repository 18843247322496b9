"""Detached groups: a second program uses, restarts and ends what a first one launched."""

from __future__ import annotations

import os
from functools import partial
from unittest import mock

import psutil
import pytest
from controller_workers import Accumulator, Leaver, Trouble
from ray_programs import ClusterProgram, Program

from enginehouse.controller import (
    ControllerError,
    GroupClosed,
    RemoteError,
    ResourcePool,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    WorkerTimeout,
    merge_resource_pools,
    start_ray,
)

pytestmark = pytest.mark.slow

CPUS = 4


@pytest.fixture(scope="module")
def cluster():
    """A cluster, and a program on it."""
    program = ClusterProgram({"num_cpus": CPUS})
    yield program
    program.end()


@pytest.fixture(scope="module")
def second(cluster):
    """Another program on the same cluster."""
    program = Program()
    program.run(_join, cluster.address)
    yield program
    program.end()


@pytest.fixture
def first(cluster):
    """The program that launches; no detached group is left of it."""
    yield cluster
    cluster.run(_end_all)


def _join(address):
    start_ray(address)


def _end_all():
    from enginehouse.controller.launchers.detached import existing

    groups.clear()
    for name in existing():
        WorkerGroup.attach(name).shutdown()


groups: dict[str, WorkerGroup] = {}
"""What a program holds between the functions it runs."""


def _launch(name="actor", cls=Accumulator, args=(), processes=2, distributed=False):
    spec = WorkerSpec(cls, *args).options(distributed=distributed)
    groups[name] = WorkerGroup(ResourcePool([processes]), spec, name=name, timeout=120, detached=True)
    return groups[name].pids


def _attach(name="actor"):
    groups[name] = WorkerGroup.attach(name)
    return groups[name].pids


def _call(method, *args, name="actor"):
    return getattr(groups[name], method)(*args)


def _error_of(function, *args):
    """Which error a function ends in, and what it says."""
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def test_two_programs_call_one_group(first, second):
    pids = first.run(_launch)
    assert second.run(_attach) == pids
    assert first.run(_call, "add", 1) == [1, 1]
    assert second.run(_call, "add", 2) == [3, 3]
    assert second.run(_call, "execute_rank", 1, "unregistered", 5) == 6
    assert first.run(_call, "add_own", [1, 2]) == [4, 5]
    assert second.run(_facts) == ("actor", 2, None, [None, None])


def _facts():
    group = groups["actor"]
    return group.name, group.world_size, group.broken, group.meshes


def test_a_group_outlives_the_program_that_launched_it(first, second):
    for last_act in ("end", "kill"):
        program = Program()
        program.run(_join, first.address)
        pids = program.run(_launch)
        assert program.run(_call, "add", 1) == [1, 1]
        getattr(program, last_act)()
        assert second.run(_attach) == pids
        assert second.run(_call, "add", 1) == [2, 2]
        second.run(_call, "shutdown")
        assert not any(_alive(pid) for pid in pids)


def test_leaving_a_with_block_lets_go_of_the_group(first, second):
    pids, (kind, said) = first.run(_let_go)
    assert kind is GroupClosed
    assert "let go of actor; it runs on, and WorkerGroup.attach finds it" in said
    assert second.run(_attach) == pids
    assert second.run(_call, "add", 1) == [1, 1]


def _let_go():
    pids = _launch()
    with groups["actor"] as group:
        pass
    return pids, _error_of(group.add, 1)


def test_a_shutdown_ends_the_group_for_everybody_in_order(first, second, tmp_path):
    note = tmp_path / "note"
    pids = first.run(_launch, "actor", Leaver, (str(note),))
    second.run(_attach)
    children = second.run(_call, "execute_all", "start_child")
    second.run(_call, "shutdown")
    assert sorted(note.read_text().splitlines()) == ["rank 0 left", "rank 1 left"]
    assert not any(_alive(pid) for pid in [*pids, *children])
    kind, _ = first.run(_error_of, _call, "execute_all", "start_child")
    assert kind is WorkerDied
    assert first.run(_launch, "whole cluster", Accumulator, (), CPUS), "its places were given back, and its name"


def test_an_unknown_name_is_answered_with_those_there_are(first, second):
    kind, said = second.run(_error_of, _attach, "critic")
    assert kind is ControllerError
    assert "no detached group 'critic' on this cluster; there is none" in said
    first.run(_launch)
    _, said = second.run(_error_of, _attach, "critic")
    assert "there are 'actor'" in said


def test_a_name_is_taken_while_its_group_lives(first, second):
    first.run(_launch)
    kind, said = second.run(_error_of, _launch)
    assert kind is ControllerError
    assert "a detached group 'actor' exists" in said
    assert "WorkerGroup.attach('actor')" in said
    assert first.run(_call, "add", 1) == [1, 1]


def test_two_programs_that_launch_one_name_at_the_same_time_are_not_both_let(first, second):
    first.run(_launch)
    kind, said = second.run(_launch_without_looking)
    assert kind is ControllerError
    assert "a detached group 'actor' exists" in said
    assert "WorkerGroup.attach('actor')" in said
    assert first.run(_call, "add", 1) == [1, 1]


def _launch_without_looking():
    """As if the other program's group had not been there yet when this one looked."""
    with mock.patch("enginehouse.controller.launchers.detached.make_room"):
        return _error_of(_launch)


def test_a_restart_in_one_program_breaks_the_group_of_the_other_which_attaches_again(first, second):
    before = first.run(_launch)
    second.run(_attach)
    second.run(_call, "restart")
    kind, _ = first.run(_error_of, _call, "add", 1)
    assert kind is WorkerDied
    after = first.run(_attach)
    assert not set(before) & set(after)
    assert (first.run(_call, "add", 1), second.run(_call, "add", 1)) == ([1, 1], [2, 2])


@pytest.mark.parametrize("old", ["the one that launched it", "one that attached to it"])
def test_a_group_that_another_program_restarted_is_not_restarted_or_ended_by_the_old_handle(first, second, old):
    before = first.run(_launch)
    second.run(_attach)
    stale, fresh = (first, second) if old == "the one that launched it" else (second, first)
    fresh.run(_call, "restart")
    kind, said = stale.run(_error_of, _call, "restart")
    assert kind is GroupClosed
    assert "actor cannot be restarted here: another program restarted it or launched it anew; attach again" in said
    stale.run(_call, "shutdown")
    assert fresh.run(_call, "add", 1) == [1, 1]
    after = stale.run(_attach)
    assert not set(before) & set(after)
    fresh.run(_call, "shutdown")
    assert not any(_alive(pid) for pid in after)
    assert first.run(_launch, "whole cluster", Accumulator, (), CPUS), "its places were given back"


def test_a_restart_that_fails_may_be_tried_again_at_once(first, second, tmp_path):
    path = tmp_path / "ready"
    path.touch()
    first.run(_launch, "actor", _NeedsAFile, (str(path),))
    path.unlink()
    kinds, said = first.run(_restart_until_it_works, path)
    assert kinds == [RemoteError, RemoteError, None], said


def _restart_until_it_works(path):
    group = groups["actor"]
    failed = [_error_of(group.restart) for _ in range(2)]
    path.touch()
    failed.append(_error_of(group.restart))
    return [kind for kind, _ in failed], failed


class _NeedsAFile:
    def __init__(self, path: str):
        with open(path):
            pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_with_a_dead_rank_is_found_broken_and_can_be_restarted(first, second, rank):
    pids = first.run(_launch, "actor", Trouble)
    os.kill(pids[rank], 9)
    kind, _ = first.run(_error_of, _call, "fine")
    assert kind is WorkerDied
    second.run(_attach)
    kind, said = second.run(_error_of, _call, "fine")
    assert kind is GroupClosed
    assert f"rank(s) {rank} were gone when this program attached" in said
    second.run(_call, "restart")
    assert second.run(_call, "fine") == [0, 1]


def test_a_busy_group_can_be_attached_to_and_restarted(first, second):
    pids = first.run(_launch, "actor", Trouble)
    kind, _ = first.run(_hang_a_moment)
    assert kind is WorkerTimeout
    assert second.run(_attach) == pids
    second.run(_call, "restart")
    assert second.run(_call, "fine") == [0, 1]
    assert not any(_alive(pid) for pid in pids)


def _hang_a_moment():
    return _error_of(lambda: groups["actor"].call("hang_on", 1, timeout=0.5))


def test_what_is_left_of_a_group_whose_processes_all_died_is_given_back(first, second):
    for pid in first.run(_launch, "actor", Trouble, (), CPUS):
        os.kill(pid, 9)
    first.run(_error_of, _call, "fine")
    second.run(_launch, "actor", Accumulator, (), CPUS)
    assert second.run(_call, "add", 1) == [1] * CPUS


def test_a_detached_group_needs_a_pool_of_its_own(first):
    assert first.run(_pools_refused) == [
        "may hold 2 groups",
        "is merged or split from others",
        "is merged or split from others",
        "was reserved for this program already",
    ]


def _pools_refused():
    used = ResourcePool([1])
    used.occupy("before").leave()
    pools = [
        ResourcePool([1], max_colocate=2),
        merge_resource_pools(ResourcePool([1]), ResourcePool([1])),
        ResourcePool([2]).split(2)[0],
        used,
    ]
    spec = WorkerSpec(Accumulator)
    refusals = [_error_of(partial(WorkerGroup, pool, spec, name="actor", detached=True)) for pool in pools]
    return [said.split(", and a detached group")[0].split("' ", 1)[1] for _, said in refusals]


def test_what_ends_with_this_program_cannot_be_detached(ray_cluster):
    with pytest.raises(ControllerError, match=r"'actor' cannot be detached.*ray start --head.*start_ray\('auto'\)"):
        WorkerGroup(ResourcePool([1]), WorkerSpec(Accumulator), name="actor", detached=True)
    with pytest.raises(ControllerError, match="inline group"):
        WorkerGroup(None, WorkerSpec(Accumulator), name="actor", launcher="inline", detached=True)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
