"""Several roles in one process, and async beside sync methods."""

import os
import threading

import psutil
import pytest
from controller_workers import Accumulator, Diary, Meeting, Trouble

from enginehouse.controller import (
    ControllerError,
    GroupClosed,
    RemoteError,
    ResourcePool,
    WorkerDied,
    WorkerSpec,
    colocate,
)

pytestmark = pytest.mark.slow  # a start of processes or more a test


@pytest.fixture
def diaries(ray_cluster):
    pool = ResourcePool([2])
    spec = WorkerSpec(Diary).options(distributed=False)
    groups = colocate(pool, {"actor": spec, "rollout": spec}, timeout=30)
    yield groups
    for group in groups.values():
        group.shutdown()
    pool.shutdown()


def test_roles_of_a_process_run_one_after_the_other_on_one_thread(diaries):
    actor, rollout = diaries["actor"], diaries["rollout"]
    assert actor.process() == rollout.process() == actor.pids
    written = [("actor", 0), ("rollout", 1), ("rollout", 2), ("actor", 3), ("rollout", 4)]
    for future in [diaries[role].call("write", number, blocking=False) for role, number in written]:
        future.result()
    lines = actor.read()
    assert [(role, number) for role, number, _ in lines] == written
    assert len({thread for *_, thread in lines}) == 1


def test_shared_processes_end_with_the_last_of_their_groups(diaries):
    actor, rollout = diaries["actor"], diaries["rollout"]
    actor.shutdown()
    with pytest.raises(GroupClosed, match=r"actor\.read"):
        actor.read()
    assert rollout.process() == rollout.pids
    rollout.shutdown()
    assert not any(_alive(pid) for pid in rollout.pids)


def test_a_death_breaks_every_role_of_the_process(diaries):
    os.kill(diaries["actor"].pids[1], 9)
    with pytest.raises(WorkerDied, match="actor rank 1"):
        diaries["actor"].process()
    with pytest.raises(GroupClosed, match="rank 1"):
        diaries["rollout"].process()


def test_a_role_that_cannot_be_built_is_named(ray_cluster):
    specs = {
        "good": WorkerSpec(Diary).options(distributed=False),
        "bad": WorkerSpec(Trouble, "no").options(distributed=False),
    }
    pool = ResourcePool([1])
    with pytest.raises(RemoteError, match=r"bad rank 0 .*ValueError: no"):
        colocate(pool, specs)
    pool.shutdown()


def test_roles_must_agree_on_their_process(ray_cluster):
    spec = WorkerSpec(Diary)
    for which in ("env", "variables"):
        specs = {role: spec.options(**{which: {"A": value}}) for role, value in (("a", "1"), ("b", "2"))}
        with pytest.raises(ControllerError, match="different values of the environment variable A "):
            colocate(ResourcePool([1]), specs)
    with pytest.raises(ControllerError, match="at least one role"):
        colocate(None, {})


def test_async_methods_run_at_once_on_one_loop_beside_sync_ones_and_raise_like_them(launch):
    group = launch(Meeting, processes=1, name="meeting")
    waiting = group.call("block_until_arrived", 3, blocking=False)
    arrivals = [group.call("arrive", 3, blocking=False) for _ in range(3)]
    assert len({future.result()[0] for future in arrivals}) == 1, "one event loop"
    assert waiting.result() == [True], "the main thread was not in their way, nor they in its"

    with pytest.raises(RemoteError, match=r"meeting rank 0 .*'fail' raised KeyError") as caught:
        group.fail()
    assert isinstance(caught.value.cause, KeyError)


def test_calls_from_several_threads_reach_every_rank_in_one_order(standing):
    group = standing(Accumulator, name="sum")
    group.execute_all("restart", 0)
    results: list[list[int]] = []

    def add() -> None:
        results.extend(group.add(1) for _ in range(20))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(first == second for first, second in results)
    assert sorted(first for first, _ in results) == list(range(1, 81))


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
