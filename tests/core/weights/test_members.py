"""Calls of replicas that fail one by one, and the two sides of an update. The calls are fakes that end when told to."""

import threading
import time
from types import SimpleNamespace

import pytest

from enginehouse.controller import Future, StillRunning, WorkerDied
from enginehouse.controller.members import Gathered, Member
from enginehouse.engines.weights import WeightUpdateAborted
from enginehouse.weights.connection import await_both


class FakePending:
    def __init__(self):
        self.deadline = time.monotonic() + 3600.0
        self.outcome = None
        self.callbacks = []

    def wait(self, limit=None):
        if self.outcome is None:
            raise StillRunning("the call still runs")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]

    def done(self):
        return self.outcome is not None

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def look(self):
        pass

    def end(self, outcome):
        self.outcome = outcome
        for callback in self.callbacks:
            callback(not isinstance(outcome, Exception))


def gathered(*pendings: FakePending) -> Gathered:
    members = [Member(number, 0, SimpleNamespace(name=f"rollout-{number}")) for number in range(len(pendings))]
    calls = [Future(pending, lambda outputs: outputs) for pending in pendings]
    return Gathered(members, calls, lambda member, error: False, False)


def test_the_cause_is_told_though_one_rank_raised_before_it_and_the_other_side_hangs():
    hanging, told, cause = FakePending(), FakePending(), FakePending()
    told.end(WeightUpdateAborted("somebody gave up"))
    threading.Timer(0.05, cause.end, [WorkerDied("the process ended")]).start()
    with pytest.raises(WorkerDied, match="the process ended"):
        await_both(gathered(hanging), gathered(told, cause))


def test_both_sides_are_awaited():
    waited, other = FakePending(), FakePending()
    waited.end("arrived")
    threading.Timer(0.05, other.end, ["sent"]).start()
    assert await_both(gathered(waited), gathered(other)) == ["arrived"]
    assert other.done()
