"""What a failing worker's error says, and what the group does afterwards."""

import gc
import os
import pickle
import signal
import time

import pytest
import ray
from controller_workers import Meeting, Trouble

from enginehouse.controller import (
    ControllerError,
    GroupClosed,
    PlacementError,
    RemoteError,
    ResourcePool,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    WorkerTimeout,
    merge_resource_pools,
    unwrap_user_error,
)
from enginehouse.controller.future import iterate_ended
from enginehouse.errors import ModelError

pytestmark = pytest.mark.slow


def test_an_exception_surfaces_at_once_while_other_ranks_hang(launch):
    trouble = launch(Trouble, name="trouble")
    with pytest.raises(RemoteError) as caught:
        trouble.raise_on(1, others_hang=True)
    error = caught.value
    assert (error.role, error.rank, error.method, error.pid) == ("trouble", 1, "raise_on", trouble.pids[1])
    assert error.node == trouble.nodes[1]
    for part in ("trouble", "rank 1", str(error.pid), error.node, "raise_on", "ValueError: bad value on rank 1"):
        assert part in str(error)
    assert isinstance(error.cause, ValueError)
    assert "controller_workers.py" in error.traceback_text
    assert "launchers" not in error.traceback_text, "our own machinery tells a user nothing"
    assert error.traceback_text.strip() in str(error.__cause__)
    assert any("about to fail on rank 1" in line and "[trouble 1/2]" in line for line in error.log_lines)


def test_a_group_outlives_an_exception_on_every_rank(trouble):
    for _ in range(2):
        with pytest.raises(RemoteError):
            trouble.raise_on(0)
        assert trouble.fine() == [0, 1]


def test_a_call_waits_for_ranks_that_were_left_behind(trouble):
    with pytest.raises(RemoteError, match="rank 1"):
        trouble.linger(0.5, 1)
    assert trouble.fine() == [0, 1]


def test_an_exception_that_cannot_travel_is_told_in_words(trouble):
    with pytest.raises(RemoteError, match="Unpicklable: cannot travel") as caught:
        trouble.raise_unpicklable()
    assert caught.value.cause is None
    assert caught.value.type_name == "Unpicklable"


def test_a_result_that_cannot_travel_is_an_error_with_a_rank(trouble):
    with pytest.raises(RemoteError, match=r"rank \d.*'give_back_a_lock'.*lock"):
        trouble.give_back_a_lock()


def test_sys_exit_in_a_worker_is_an_error_like_others(trouble):
    with pytest.raises(RemoteError, match="SystemExit: 5"):
        trouble.exit()
    assert trouble.fine() == [0, 1]


def test_a_killed_rank_is_named_while_others_hang(trouble):
    with pytest.raises(WorkerDied) as caught:
        trouble.die_on(1, others_hang=True)
    error = caught.value
    assert (error.role, error.rank, error.method, error.pid) == ("trouble", 1, "die_on", trouble.pids[1])
    assert any("being built" in line for line in error.log_lines), "the tail of its log file"
    with pytest.raises(GroupClosed, match=r"rank 1.*died") as refused:
        trouble.fine()
    assert refused.value.reason == trouble.broken
    with pytest.raises(GroupClosed, match=r"rank 1.*died"):
        trouble.refresh_meshes()


def test_a_rank_killed_between_calls_is_named_by_the_next(trouble):
    os.kill(trouble.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 0"):
        trouble.fine()


def test_a_hang_is_reported_with_the_function_it_hangs_in(trouble):
    with pytest.raises(WorkerTimeout) as caught:
        trouble.call("hang_on", 1, timeout=0.5)
    error = caught.value
    assert (error.rank, error.method, error.seconds) == (1, "hang_on", 0.5)
    assert "in hang_for_ever" in str(error)
    assert "in hang_on" in error.stacks[1]
    assert list(error.stacks) == [1], "rank 0 is not late"
    with pytest.raises(GroupClosed, match="'hang_on' did not end"):
        trouble.fine()


def test_a_call_takes_as_long_as_it_gets_on_and_a_hang_after_that_is_ended_in_the_limit(launch):
    group = launch(Trouble, name="long", timeout=3.0)  # on a busy machine a worker may not run for a second or two
    assert group.get_on(4.0) == [0, 1]
    later = group.call("get_on", 4.0, blocking=False)
    assert not later.done()
    assert list(iterate_ended([later])) == [later]
    assert later.result() == [0, 1]
    begun = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"'get_on' made no progress for 3 s") as caught:
        group.get_on(4.0, then_hang=True)
    assert time.monotonic() - begun > 4.0 + 2.0  # not three seconds after the call began
    assert (caught.value.rank, caught.value.seconds) == (0, 3.0)
    assert "in hang_for_ever" in caught.value.stacks[0]


def test_a_limit_that_a_call_was_given_is_kept_however_it_gets_on(trouble):
    with pytest.raises(WorkerTimeout, match=r"'get_on' did not end within 0\.3 s"):
        trouble.call("get_on", 30, timeout=0.3)


def test_calls_are_given_when_a_rank_fails_and_when_their_deadline_passes(launch):
    failing, hanging = (launch(Trouble, name=name) for name in ("failing", "hanging"))
    late = hanging.call("hang_on", 1, timeout=3, blocking=False)
    failed = failing.call("raise_on", 1, others_hang=True, blocking=False)
    ends = iterate_ended([late, failed])
    assert next(ends) is failed
    with pytest.raises(RemoteError, match="bad value on rank 1"):
        failed.result()
    assert next(ends) is late
    with pytest.raises(WorkerTimeout, match="in hang_for_ever"):
        late.result()


def test_a_hanging_coroutine_is_reported_with_what_it_awaits(trouble):
    with pytest.raises(WorkerTimeout, match="in sleep_for_ever") as caught:
        trouble.call("hang_async", timeout=0.3)
    assert set(caught.value.stacks) == {0, 1}


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs POSIX signals")
def test_native_code_that_holds_the_interpreter_is_seen_through(launch):
    group = launch(Trouble, name="native", processes=1)
    with pytest.raises(WorkerTimeout, match="in hold_the_interpreter"):
        group.call("hang_in_native_code", timeout=0.3)


def test_a_stopped_process_is_called_that(launch):
    group = launch(Trouble, name="stopped", processes=1)
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match="its process is stopped"):
        group.call("fine", timeout=0.3)


def test_meshes_that_come_late_leave_the_group_whole(launch):
    group = launch(Meeting, name="meeting", timeout=1)
    waiting = group.call("block_until_arrived", 1, timeout=60, blocking=False)
    with pytest.raises(WorkerTimeout, match="'mesh' did not end within 1 s"):
        group.refresh_meshes()
    assert group.broken is None
    group.call("arrive", 1, timeout=60)
    assert waiting.result() == [True, True]


def test_a_futures_deadline_counts_from_the_call(trouble):
    future = trouble.call("hang_on", 0, timeout=0.5, blocking=False)
    with pytest.raises(WorkerTimeout, match="rank 0"):
        future.result()
    with pytest.raises(WorkerTimeout, match="rank 0"):
        future.result()


def test_a_future_that_failed_fails_the_call_it_is_given_to(trouble, standing):
    other = standing(Trouble, name="other")
    failing = trouble.execute_rank_zero_async("raise_on", 0)
    with pytest.raises(RemoteError, match=r"trouble rank 0 .*bad value on rank 0"):
        other.linger(failing, 5)


def test_a_death_behind_a_future_is_the_producers_and_leaves_the_consumer_whole(trouble, standing):
    other = standing(Trouble, name="other")
    dying = trouble.execute_rank_zero_async("die_on", 0)
    with pytest.raises(WorkerDied, match=r"^trouble rank 0 .*died during 'die_on'.*\n.*other\.linger") as caught:
        other.linger(dying, 5)
    error = caught.value
    assert (error.role, error.rank, error.method, error.pid) == ("trouble", 0, "die_on", trouble.pids[0])
    assert other.fine() == [0, 1]
    with pytest.raises(WorkerDied, match="trouble rank 0"):
        dying.result()


def test_a_call_that_waits_for_a_late_future_says_for_whose(launch, standing):
    producer = launch(Meeting, name="producer", timeout=60, processes=1)
    late = producer.execute_rank_zero_async("block_until_arrived", 1)
    other = standing(Trouble, name="other")
    with pytest.raises(WorkerTimeout, match=r"waits for producer rank 0's 'block_until_arrived'"):
        other.call("linger", late, 5, timeout=0.5)
    producer.arrive(1)


def test_errors_survive_pickling(trouble):
    with pytest.raises(RemoteError) as caught:
        trouble.raise_on(1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert (copy.rank, copy.role, copy.log_lines, type(copy.cause)) == (
        1,
        "trouble",
        caught.value.log_lines,
        ValueError,
    )


def test_a_users_mistake_in_a_worker_is_found_again(launch):
    with pytest.raises(RemoteError, match=r"bad rank 1 .*'__init__' raised ModelError") as caught:
        launch(Trouble, "model", 1, name="bad")
    blamed = unwrap_user_error(caught.value)
    assert isinstance(blamed, ModelError)
    assert str(blamed) == "no model at /nowhere"
    assert unwrap_user_error(ValueError()) is None


def test_a_worker_that_dies_while_it_is_built_is_named(launch):
    with pytest.raises(WorkerDied, match=r"rank 0 .*'__init__'"):
        launch(Trouble, "die", 0, name="bad")


def test_a_worker_that_is_never_built_ends_the_start(launch):
    with pytest.raises(WorkerTimeout, match=r"'__init__' did not end within 15 s") as caught:
        launch(Trouble, "hang", 1, name="bad", start_timeout=15)
    assert caught.value.rank == 1
    assert "in hang_for_ever" in caught.value.stacks[1]


def test_a_pool_the_cluster_cannot_give_is_refused_with_both_sides(ray_cluster):
    with pytest.raises(PlacementError, match=r"100 processes on one node, 1 CPU each.*16 CPU"):
        WorkerGroup(ResourcePool([100], name="greedy"), WorkerSpec(Trouble))
    with pytest.raises(PlacementError, match=r"1 GPU"):
        WorkerGroup(ResourcePool([1], gpus_per_process=1), WorkerSpec(Trouble))


def test_a_pool_that_others_occupy_is_waited_for_until_its_deadline(ray_cluster):
    most = int(ray.available_resources()["CPU"])
    held = ResourcePool([1], cpus_per_process=most)
    held.lease("holder")
    with pytest.raises(PlacementError, match=rf"not placed within 0\.5 s.*{most} CPU each.*free now"):
        ResourcePool([1], cpus_per_process=most, timeout=0.5).lease("late")
    held.shutdown()
    forgotten = ResourcePool([1], cpus_per_process=most)
    forgotten.lease("forgetful")
    del forgotten
    gc.collect()
    again = ResourcePool([1], cpus_per_process=most)
    again.lease("next")
    again.shutdown()


def test_a_full_pool_says_who_sits_on_it(launch):
    pool = ResourcePool([1], name="small")
    with (
        WorkerGroup(pool, WorkerSpec(Trouble).options(distributed=False), name="first"),
        pytest.raises(PlacementError, match=r"'small'.*first.*'second'"),
    ):
        WorkerGroup(pool, WorkerSpec(Trouble), name="second")
    pool.shutdown()


def test_impossible_requests_are_refused_in_words(ray_cluster):
    with pytest.raises(ControllerError, match="processes_per_node"):
        ResourcePool([])
    with pytest.raises(ControllerError, match=r"\[4\] or \[4, 2\], not 4"):
        ResourcePool(4)
    with pytest.raises(ControllerError, match=r"\*pools\).* given list"):
        merge_resource_pools([ResourcePool([1]), ResourcePool([1])])
    with pytest.raises(ControllerError, match="'ray' or 'inline'"):
        WorkerGroup(ResourcePool([1]), WorkerSpec(Trouble), launcher="slurm")
    with pytest.raises(ControllerError, match="gpus_per_process"):
        WorkerGroup(ResourcePool([1]), WorkerSpec(Trouble), device="cuda")
