"""The inline launcher: the same program in one process."""

import asyncio
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from controller_shards import Sharded
from controller_workers import Accumulator, Meeting, Reducer, Surroundings, Trouble, Unpicklable

from enginehouse.controller import (
    ControllerError,
    DispatchError,
    GroupClosed,
    RemoteError,
    ResourcePool,
    StillRunning,
    WorkerDied,
    WorkerGroup,
    WorkerSpec,
    colocate,
)
from enginehouse.data import Batch


@pytest.fixture
def inline():
    groups = []

    def launch(cls, *args, distributed=False, **options):
        spec = WorkerSpec(cls, *args).options(distributed=distributed)
        groups.append(WorkerGroup(None, spec, launcher="inline", **options))
        return groups[-1]

    yield launch
    for group in groups:
        group.shutdown()


def test_every_mode_answers_as_over_ray(inline):
    group = inline(Accumulator, 5)
    assert group.add(3) == [8]
    assert group.total_of_rank_zero() == 8
    assert group.add_own([1], scale=[2]) == [10]
    assert group.add_later(1).result() == [11]
    assert group.metrics()["lr"] == 0.5
    assert group.execute_all("unregistered") == [1]
    assert group.pids == [os.getpid()]


def test_batches_go_through_and_come_back(inline):
    batch = Batch({"x": torch.arange(3), "name": ["a", "b", "c"]})
    assert inline(Sharded).times(batch).column("x").tolist() == [0, 2, 4]


def test_what_a_worker_raises_is_reported_as_over_ray_with_the_very_exception_behind(inline):
    group = inline(Trouble, name="odd")
    with pytest.raises(RemoteError, match=rf"^odd rank 0 \(node .*, pid {os.getpid()}\): 'raise_unpick") as caught:
        group.raise_unpicklable()
    error = caught.value
    assert (error.role, error.method, error.type_name) == ("odd", "raise_unpicklable", "Unpicklable")
    assert error.cause is error.__cause__
    assert isinstance(error.cause, Unpicklable)
    assert hasattr(error.cause, "lock"), "the very object"
    assert error.cause.__traceback__ is not None
    assert "in raise_unpicklable" in error.traceback_text
    with pytest.raises(RemoteError, match=r"'__init__' raised ValueError: no$"):
        inline(Trouble, "no")
    assert group.fine() == [0]


def test_an_error_pickles_though_what_is_behind_it_does_not(inline):
    group = inline(Trouble)
    with pytest.raises(RemoteError) as caught:
        group.raise_unpicklable()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert (copy.cause, copy.type_name, copy.pid) == (None, "Unpicklable", os.getpid())
    assert "Unpicklable: cannot travel" in str(copy.__cause__)
    with pytest.raises(RemoteError) as caught:
        group.raise_on(0)
    assert repr(pickle.loads(pickle.dumps(caught.value)).cause) == "ValueError('bad value on rank 0')"


@pytest.mark.parametrize(("end", "how"), [("shutdown", "was shut down"), ("restart", "was restarted")])
def test_a_call_that_still_ran_when_its_group_was_ended_says_so(inline, end, how):
    group = inline(Trouble, name="odd")
    future = group.call("hang_async", blocking=False)
    getattr(group, end)()
    with pytest.raises(WorkerDied, match=rf"^odd rank 0 .*'hang_async' had not ended.*: odd {how}$") as caught:
        future.result()
    assert (caught.value.role, caught.value.method) == ("odd", "hang_async")


def test_sync_methods_run_on_the_callers_thread_and_async_ones_on_a_loop(inline):
    group = inline(Meeting)
    arrivals = [group.call("arrive", 2, blocking=False) for _ in range(2)]
    threads = {future.result()[0] for future in arrivals}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    with pytest.raises(RemoteError, match=r"'fail' raised KeyError"):
        group.fail()


async def test_who_awaits_a_call_that_exits_is_told(inline):
    future = inline(Trouble, name="odd").call("exit_async", blocking=False)
    with pytest.raises(RemoteError, match=r"^odd rank 0 .*'exit_async' raised SystemExit: 2$"):
        await asyncio.wait_for(future, 10)


def test_a_future_can_be_polled(inline):
    group = inline(Trouble)
    future = group.call("hang_async", blocking=False)
    with pytest.raises(StillRunning):
        future.result(timeout=0.01)
    assert not future.done()


def test_a_batch_that_is_not_there_by_the_calls_deadline_is_an_error(inline):
    future = inline(Trouble).call("hang_async", blocking=False)
    with pytest.raises(DispatchError, match=r"times was not sent.*0\.01 s"):
        inline(Sharded).call("times", future, timeout=0.01)


def test_a_failed_call_that_was_not_waited_for_raises_when_asked(inline):
    future = inline(Trouble).call("raise_on", 0, blocking=False)
    assert future.done()
    with pytest.raises(RemoteError, match="raised ValueError: bad value"):
        future.result()


def test_torch_distributed_works_and_the_environment_is_put_back(inline):
    before = os.environ.get("MASTER_PORT")
    group = inline(Reducer, distributed=True)
    assert group.sum_of_ranks() == [1]
    group.shutdown()
    assert os.environ.get("MASTER_PORT") == before
    with pytest.raises(GroupClosed):
        group.sum_of_ranks()


def test_roles_can_be_colocated(inline):
    specs = {role: WorkerSpec(Surroundings).options(distributed=False) for role in ("actor", "rollout")}
    groups = colocate(ResourcePool([1]), specs, launcher="inline", seed=7)
    place = groups["rollout"].execute_rank_zero("place")
    assert (place.role, place.seed, place.labels["roles"]) == ("rollout", 7, ("actor", "rollout"))
    for group in groups.values():
        group.shutdown()


def test_only_one_process_fits(inline):
    with pytest.raises(ControllerError, match=r"one process.* has 2"):
        WorkerGroup(ResourcePool([2]), WorkerSpec(Trouble), launcher="inline")


def test_observers_are_told_of_each_call(inline, monkeypatch):
    told = []
    observers = SimpleNamespace(observes=lambda event: True, observe=lambda event, **facts: told.append((event, facts)))
    group = inline(Trouble, name="told")
    monkeypatch.setattr("enginehouse.controller.tracing.plugins", lambda: observers)
    group.fine()
    with pytest.raises(RemoteError, match="raised ValueError: bad value"):
        group.raise_on(0)
    assert [event for event, _ in told] == ["call_dispatched", "call_collected"] * 2
    assert {facts["group"] for _, facts in told} == {"told"}
    assert told[1][1]["seconds"] > 0
    assert told[0][1]["call"] == told[1][1]["call"] < told[2][1]["call"]


def test_a_slip_in_a_methods_name_says_what_to_do(inline):
    group = inline(Sharded)
    with pytest.raises(AttributeError, match=r"Sharded\.what_was_seen is not registered: decorate it with @register"):
        group.what_was_seen()
    with pytest.raises(AttributeError, match=r"no method 'row'.*Did you mean 'rows'"):
        group.row()
    with pytest.raises(ControllerError, match=r"write WorkerSpec\(Sharded, \.\.\.\) instead of Sharded"):
        WorkerGroup(None, Sharded, launcher="inline")
