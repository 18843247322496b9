"""Waiting for several calls at a time, where what answers them goes away. The calls are fakes that go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from enginehouse.controller import Future, StillRunning
from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.future import Ends, as_they_end


class FakePending:
    """A call that ends when it is told to."""

    def __init__(self, seconds: float = 3600.0, lost: BaseException | None = None):
        self.deadline = time.monotonic() + seconds
        self.callbacks: list[Callable[[], object]] = []
        self.lost = lost
        self.hurried = False

    def wait(self, limit=None):
        return [self]

    def done(self):
        return False

    def reference(self, rank):
        return None

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def look(self):
        if self.lost is not None:
            raise self.lost

    def hurry(self):
        self.hurried = True

    def end(self):
        for callback in self.callbacks:
            callback()


def future(pending: FakePending) -> Future:
    return Future(pending, lambda outputs: outputs[0])


def test_ends_come_in_order_from_other_threads_and_events_among_them():
    first, second = FakePending(), FakePending()
    ends: Ends[str] = Ends()
    calls = {pending: future(pending) for pending in (first, second)}
    for call in calls.values():
        ends.add(call)
    second.end()
    ends.put("something else")
    threading.Timer(0.01, first.end).start()
    assert [ends.next(), ends.next(), ends.next()] == [calls[second], "something else", calls[first]]
    with pytest.raises(StillRunning):
        ends.next(0.0)


def test_a_call_whose_deadline_passed_is_given_once():
    late, other = FakePending(seconds=0.0), FakePending()
    call, waiting = future(late), future(other)
    ends = as_they_end([call, waiting])
    assert next(ends) is call
    late.end()
    other.end()
    assert list(ends) == [waiting]


def test_a_cluster_that_is_lost_ends_the_wait():
    with pytest.raises(ClusterLost, match="gone"):
        next(as_they_end([future(FakePending(lost=ClusterLost("gone")))]))


def test_who_is_interrupted_hurries_what_still_runs():
    running = FakePending(lost=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(as_they_end([future(running)]))
    assert running.hurried
