"""Waiting for several calls at a time, where what answers them goes away. The calls are fakes that go wrong."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from enginehouse.controller import Future
from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.future import iterate_ended


class FakePending:
    """A call that ends when it is told to."""

    def __init__(self, seconds: float = 3600.0, lost: BaseException | None = None):
        self.deadline = time.monotonic() + seconds
        self.callbacks: list[Callable[[], object]] = []
        self.lost = lost
        self.hurried = False
        self.gets_on = False

    def wait(self, limit=None):
        self.waited_by = threading.current_thread()
        return [self]

    def done(self):
        return False

    def overdue(self):
        self.asked_by = threading.current_thread()
        if self.gets_on:
            self.deadline, self.gets_on = time.monotonic() + 3600.0, False
            threading.Timer(0.01, self.end).start()
        return self.deadline <= time.monotonic()

    def reference(self, rank):
        return None

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def look(self):
        if self.lost is not None:
            raise self.lost

    def hurry(self):
        self.hurried = True

    def end(self, well=True):
        for callback in self.callbacks:
            callback(well)


def future(pending: FakePending) -> Future:
    return Future(pending, lambda outputs: outputs[0])


def test_calls_come_as_they_end_in_other_threads():
    first, second = FakePending(), FakePending()
    calls = {pending: future(pending) for pending in (first, second)}
    ends = iterate_ended(calls.values())
    threading.Timer(0.01, second.end).start()
    assert next(ends) is calls[second]
    threading.Timer(0.01, first.end).start()
    assert list(ends) == [calls[first]]


def test_a_call_whose_deadline_passed_is_given_once():
    late, other = FakePending(seconds=0.0), FakePending()
    call, waiting = future(late), future(other)
    ends = iterate_ended([call, waiting])
    assert next(ends) is call
    late.end()
    other.end()
    assert list(ends) == [waiting]


@pytest.mark.slow
def test_a_cluster_that_is_lost_ends_the_wait():
    with pytest.raises(ClusterLost, match="gone"):
        next(iterate_ended([future(FakePending(lost=ClusterLost("gone")))]))


@pytest.mark.slow
def test_who_is_interrupted_hurries_what_still_runs():
    running = FakePending(lost=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(iterate_ended([future(running)]))
    assert running.hurried


# Awaited


def awaited(pending: FakePending, meanwhile: Callable[[], object]):
    async def wait():
        asyncio.get_running_loop().call_later(0.01, meanwhile)
        return await future(pending)

    return asyncio.run(wait())


def test_an_event_loop_goes_on_while_a_call_is_awaited():
    pending = FakePending()
    assert awaited(pending, lambda: threading.Thread(target=pending.end).start()) is pending
    assert pending.waited_by is threading.current_thread()


@pytest.mark.parametrize("failed", [True, False], ids=["failed", "late"])
def test_what_went_wrong_is_found_out_off_the_loop(failed):
    """Which may take seconds: it is asked of the other processes."""
    pending = FakePending(seconds=3600.0 if failed else 0.02)
    assert awaited(pending, lambda: pending.end(well=False) if failed else None) is pending
    assert pending.waited_by is not threading.current_thread()


def test_a_call_that_gets_on_past_its_deadline_is_awaited_further_and_asked_off_the_loop():
    pending = FakePending(seconds=0.02)
    pending.gets_on = True
    assert awaited(pending, lambda: None) is pending
    assert pending.asked_by is not threading.current_thread()
    assert pending.waited_by is threading.current_thread()


def test_a_call_that_gets_on_past_its_deadline_is_given_when_it_ends():
    pending = FakePending(seconds=0.0)
    pending.gets_on = True
    call = future(pending)
    assert list(iterate_ended([call])) == [call]
    assert pending.callbacks, "it was waited for"
    assert not pending.gets_on


@pytest.mark.slow
def test_who_awaits_hears_that_the_cluster_is_lost():
    with pytest.raises(ClusterLost, match="gone"):
        awaited(FakePending(lost=ClusterLost("gone")), lambda: None)


def test_a_call_that_ends_when_nobody_awaits_it_any_more_hurts_nobody():
    pending = FakePending()

    async def give_up():
        async def wait():
            return await future(pending)

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())
    pending.end()
