"""Calls over a group of real processes."""

import threading

import numpy as np
import pytest
import ray
from controller_workers import Accumulator, Forgetful, Plain, Slow, Surroundings, TwoToAll

from enginehouse.controller import DispatchError, Future, GroupClosed, StillRunning, add_listener
from enginehouse.controller.future import iterate_ended
from enginehouse.controller.tracing import CallTrace

pytestmark = pytest.mark.slow


@pytest.fixture
def accumulator(standing):
    """Two ranks that start at 5."""
    group = standing(Accumulator, name="sum")
    group.execute_all("restart", 5)
    return group


@pytest.mark.essential
def test_an_accumulator_answers_in_every_mode(accumulator):
    assert accumulator.add(3) == [8, 8]
    assert accumulator.total_of_rank_zero() == 8
    assert accumulator.add_own([1, 2], scale=[1, 10]) == [9, 28]
    assert accumulator.first() == 0
    assert accumulator.where() == [0]
    metrics = accumulator.metrics()
    assert (metrics["loss"].value, metrics["lr"]) == (0.5, 0.5)


@pytest.mark.essential
def test_any_method_can_be_executed(accumulator):
    assert accumulator.execute_all("unregistered", value=3) == [3, 4]
    assert accumulator.execute_rank_zero("unregistered") == 1
    assert accumulator.execute_all_async("unregistered").result() == [1, 2]
    assert accumulator.execute_rank_zero_async("unregistered", 5).result() == 5


def test_calls_that_do_not_wait_keep_their_order(accumulator):
    futures = [accumulator.add_later(1) for _ in range(20)]
    assert all(isinstance(future, Future) for future in futures)
    assert [future.result() for future in futures] == [[5 + n, 5 + n] for n in range(1, 21)]
    assert futures[0].done()
    assert futures[0].result() == [6, 6], "a result can be had again"


def test_a_call_says_for_itself_whether_it_waits(accumulator):
    assert accumulator.call("add", 1, blocking=False).result() == [6, 6]
    assert accumulator.call("add_later", 1, blocking=True) == [7, 7]
    with pytest.raises(AttributeError, match=r"'subtract'.*add"):
        accumulator.call("subtract")


def test_a_future_is_an_argument_of_another_groups_call(accumulator, standing):
    other = standing(Accumulator, 0, name="other")
    accumulator.add(1)
    one_output = accumulator.call("total_of_rank_zero", blocking=False)
    assert other.add(one_output) == [6, 6]
    several_outputs = accumulator.call("first", blocking=False)
    assert other.add(several_outputs) == [6, 6]


def test_a_poll_that_gives_up_leaves_the_call_running(standing):
    group = standing(Slow, name="slow")
    future = group.execute_all_async("wait")
    with pytest.raises(StillRunning, match=r"slow\.wait"):
        future.result(timeout=0.05)
    assert not future.done()
    group.execute_all("release")
    assert future.result() == ["released", "released"]


def test_calls_are_given_in_the_order_in_which_they_end(accumulator, standing):
    group = standing(Slow, name="slower")
    waiting, quick = group.execute_all_async("wait"), accumulator.call("total_of_rank_zero", blocking=False)
    ends = iterate_ended([waiting, quick])
    assert next(ends) is quick
    with pytest.raises(StillRunning):
        next(iterate_ended([waiting], timeout=0.05))
    group.execute_all("release")
    assert next(ends) is waiting
    assert waiting.result() == ["released", "released"]
    assert list(iterate_ended([waiting])) == [waiting], "one that has ended is given at once"


def test_a_custom_mode_deals_two_values_to_four_ranks(launch):
    group = launch(TwoToAll, 2, processes=4)
    assert group.add([1, 2], y=[5, 6]) == [8, 10, 8, 10]


def test_a_dispatch_function_that_forgets_ranks_is_told_so(launch):
    group = launch(Forgetful)
    with pytest.raises(DispatchError, match=r"for each of 2 ranks.*list of length 1"):
        group.too_few()
    with pytest.raises(DispatchError, match="rank 0"):
        group.not_calls()


def test_plain_and_ray_classes_are_workers_too(launch):
    assert launch(Plain, 7, processes=1).get() == [7]
    assert launch(ray.remote(num_cpus=1)(Plain), 8, processes=1).get() == [8]


def test_large_arguments_arrive_whole(accumulator):
    values = np.arange(100_000)
    assert [int(total.sum()) for total in accumulator.add(values)] == [int((values + 5).sum())] * 2


def test_an_argument_that_cannot_travel_is_named_and_the_group_goes_on(accumulator):
    with pytest.raises(DispatchError, match=r"^sum\.add_own .*rank 1: TypeError: .*lock.*$") as refused:
        accumulator.add_own([1, threading.Lock()])
    assert "\n" not in str(refused.value)
    assert accumulator.add(0) == [6, 5], "rank 0 had been sent its part"
    with pytest.raises(DispatchError, match=r"^sum\.add .*rank 0: TypeError: .*lock.*$"):
        accumulator.add([bytes(100_000), threading.Lock()])
    assert accumulator.add(0) == [6, 5]


def test_the_group_knows_its_processes(standing):
    group = standing(Surroundings, name="here")
    places = group.execute_all("place")
    assert group.world_size == len(set(group.pids)) == 2
    assert [(place.role, place.rank, place.world_size, place.local_rank) for place in places] == [
        ("here", 0, 2, 0),
        ("here", 1, 2, 1),
    ]
    assert [place.node for place in places] == group.nodes


def test_workers_get_their_environment_and_no_torch_they_did_not_ask_for(launch):
    shape = {"SHAPE": "${round}"}  # Ray would look for a variable of that name
    group = launch(Surroundings, env={"COLOUR": "blue"}, variables=shape, threads=2)
    names = ["COLOUR", "SHAPE", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"]
    seen = [
        ["blue", "${round}", "2", "0", "2", "0", None],
        ["blue", "${round}", "2", "1", "2", "1", None],
    ]
    assert group.execute_all("environ", names) == seen
    group.restart()
    assert group.execute_all("environ", names) == seen
    assert group.execute_all("modules", ["torch"]) == [[False], [False]]


def test_an_interrupt_of_the_terminal_does_not_reach_workers(standing):
    assert standing(Surroundings, name="here").execute_all("interrupt") == ["survived", "survived"]


def test_listeners_see_every_call(accumulator):
    seen = []
    remove = add_listener(lambda *facts: seen.append(facts))
    accumulator.add(1)
    later = accumulator.add_later(1)
    later.result()
    remove()
    accumulator.add(1)
    assert [(group, method) for group, method, *_ in seen] == [("sum", "add"), ("sum", "add_later")]
    assert all(start < end for *_, start, end in seen)
    assert seen[0][2] < seen[1][2], "calls are numbered"


def test_a_group_that_was_shut_down_says_so(launch):
    group = launch(Accumulator, name="gone", processes=1)
    group.shutdown()
    group.shutdown()
    assert "shut down" in group.broken
    with pytest.raises(GroupClosed, match=r"gone\.add.*shut down"):
        group.add(1)


@pytest.mark.parametrize(("error", "traceback"), [(OSError(28, "No space left on device"), False), (KeyError(1), True)])
def test_a_listener_that_fails_is_dropped_and_a_full_disk_is_one_line(error, traceback, caplog):
    def fail(*facts: object) -> None:
        raise error

    remove = add_listener(fail)
    for _ in range(2):
        CallTrace("actor", "update").end()
    remove()
    (record,) = caplog.records
    assert type(error).__name__ in record.getMessage()
    assert bool(record.exc_info) == traceback
