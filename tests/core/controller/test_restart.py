"""A group that broke, or did not, works again after `restart`: same ranks, new processes."""

import os
import signal

import psutil
import pytest
from controller_workers import Accumulator, Diary, Leaver, Reducer, Trouble

from enginehouse.controller import (
    DispatchError,
    GroupClosed,
    RemoteError,
    ResourcePool,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    WorkerTimeout,
    colocate,
)

pytestmark = pytest.mark.slow  # a start of processes or more a test


def test_a_group_with_a_killed_rank_comes_back_with_the_same_ranks(launch):
    group = launch(Trouble, name="trouble", timeout=60)
    before = group.pids
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1"):
        group.fine()
    group.restart()
    assert group.broken is None
    assert group.fine() == [0, 1]
    assert not set(group.pids) & set(before)
    assert not any(_alive(pid) for pid in before)


def test_a_group_with_a_hung_rank_comes_back(launch):
    group = launch(Trouble, name="trouble", timeout=60)
    before = group.pids
    with pytest.raises(WorkerTimeout, match="rank 1"):
        group.call("hang_on", 1, timeout=0.5)
    group.restart()
    assert group.fine() == [0, 1]
    assert not any(_alive(pid) for pid in before)


def test_a_stopped_process_does_not_outlive_a_restart(launch):
    group = launch(Trouble, name="trouble", processes=1, timeout=60)
    before = group.pids
    os.kill(before[0], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match="stopped"):
        group.call("fine", timeout=0.5)
    group.restart()
    assert group.fine() == [0]
    assert not any(_alive(pid) for pid in before)


def test_a_whole_group_is_shut_down_in_order_and_built_anew(launch, tmp_path):
    note = tmp_path / "note"
    group = launch(Leaver, str(note))
    old = [*group.pids, *group.execute_all("start_child")]
    group.restart()
    assert sorted(note.read_text().splitlines()) == ["rank 0 left", "rank 1 left"]
    assert not any(_alive(pid) for pid in old)
    assert all(_alive(pid) for pid in group.pids)


def test_what_workers_held_is_lost_with_a_restart(launch):
    group = launch(Accumulator, 10, name="sum", timeout=60)
    assert group.add(5) == [15, 15]
    group.restart()
    assert group.add(1) == [11, 11]


def test_a_rendezvous_is_made_anew(launch):
    group = launch(Reducer, name="sum", distributed=True, timeout=60)
    assert group.sum_of_ranks() == [3, 3]
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        group.sum_of_ranks()
    group.restart()
    assert group.sum_of_ranks() == [3, 3]


def test_calls_that_had_not_ended_before_a_restart_fail_and_leave_the_new_processes_whole(launch):
    group = launch(Trouble, name="trouble", timeout=60)
    before = group.pids
    ended = group.call("fine", blocking=False)
    assert ended.result() == [0, 1]
    hanging = group.call("hang_on", 1, blocking=False)
    group.restart()
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"trouble rank 1 .*'hang_on'.*trouble was restarted") as caught:
            hanging.result()
        assert caught.value.pid == before[1]
    assert ended.result() == [0, 1]
    assert group.fine() == [0, 1]


def test_every_role_of_the_processes_works_again(ray_cluster):
    pool = ResourcePool([2], cpus_per_process=0.25)
    spec = WorkerSpec(Diary).options(distributed=False)
    groups = colocate(pool, {"actor": spec, "rollout": spec}, timeout=60)
    before = groups["actor"].pids
    os.kill(before[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        groups["rollout"].process()
    groups["actor"].restart()
    assert groups["rollout"].broken is None
    assert groups["rollout"].process() == groups["actor"].process() == groups["actor"].pids != before
    groups["actor"].shutdown()
    assert groups["rollout"].process() == groups["rollout"].pids
    groups["rollout"].shutdown()
    assert not any(_alive(pid) for pid in [*before, *groups["rollout"].pids])
    pool.shutdown()


def test_a_group_that_was_shut_down_stays_so(launch):
    group = launch(Trouble, name="trouble", processes=1)
    group.shutdown()
    with pytest.raises(GroupClosed, match="trouble cannot be restarted: trouble was shut down"):
        group.restart()


def test_a_restart_that_fails_leaves_the_group_broken_and_may_be_tried_again(launch, tmp_path):
    path = tmp_path / "ready"
    path.touch()
    group = launch(_NeedsAFile, str(path), name="needy", processes=1, timeout=60)
    path.unlink()
    with pytest.raises(RemoteError, match="'__init__' raised FileNotFoundError"):
        group.restart()
    with pytest.raises(GroupClosed, match=r"its restart failed: needy rank 0 .*FileNotFoundError"):
        group.execute_all("answer")
    path.touch()
    group.restart()
    assert group.execute_all("answer") == [42]


def test_an_inline_group_builds_its_worker_anew():
    group = WorkerGroup(None, WorkerSpec(Accumulator, 10).options(distributed=False), launcher="inline")
    group.add(5)
    group.restart()
    assert group.add(1) == [11]
    group.shutdown()
    with pytest.raises(GroupClosed):
        group.restart()


def test_an_inline_restart_that_fails_leaves_the_group_broken_and_may_be_tried_again(tmp_path):
    path = tmp_path / "ready"
    path.touch()
    spec = WorkerSpec(_NeedsAFile, str(path)).options(distributed=False)
    group = WorkerGroup(None, spec, name="needy", launcher="inline")
    path.unlink()
    for _ in range(2):
        with pytest.raises(RemoteError, match="'__init__' raised FileNotFoundError"):
            group.restart()
        assert group.broken.startswith("its restart failed: needy rank 0 (")
        with pytest.raises(GroupClosed, match="its restart failed"):
            group.execute_all("answer")
    path.touch()
    group.restart()
    assert group.execute_all("answer") == [42]
    group.shutdown()
    assert group.broken == "needy was shut down"


def test_one_rank_is_called_by_its_number(standing):
    group = standing(Accumulator, name="sum")
    assert group.execute_rank(1, "unregistered", value=10) == 11
    later = group.execute_rank_async(1, "unregistered", 5)
    assert group.execute_rank(0, "unregistered", later) == 6, "a future of one rank is an argument like another"
    assert later.result() == 6
    with pytest.raises(DispatchError, match="ranks 0 to 1, not 2"):
        group.execute_rank(2, "unregistered")


class _NeedsAFile:
    def __init__(self, path: str):
        with open(path):
            pass

    def answer(self) -> int:
        return 42


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
