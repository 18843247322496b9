"""Trackers in a run over Ray: three at once, one that works, one that raises and one that hangs."""

from pathlib import Path

import pytest

from .conftest import Start

pytestmark = pytest.mark.slow

FAULTY = """
import atexit, time

class Raises:
    def start(self, run): ...
    def log(self, step, metrics, kind):
        raise ConnectionError("no such service")
    def finish(self, outcome): ...

class Hangs:
    def start(self, run):
        atexit.register(time.sleep, 10000)
    def log(self, step, metrics, kind): ...
    def finish(self, outcome):
        time.sleep(10000)
"""


def test_a_tracker_that_raises_and_one_that_hangs_cost_a_run_nothing(train: Start, house: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (house / "faulty_trackers.py").write_text(FAULTY)
    names = ("tensorboard", "faulty_trackers:Raises", "faulty_trackers:Hangs")
    trackers = ", ".join(f"{{name: '{name}'}}" for name in names)
    run = train("train.steps=3", f"run.trackers=[{trackers}]", "run.grace_seconds=5")
    ended = run.finished()
    assert run.record["status"] == "finished"
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert ended.err.count("the tracker 'faulty_trackers:Raises' raised in `log`") == 1
    assert ended.err.count("ConnectionError: no such service\n") == 2  # in the sentence, and at its traceback's end
    said = "the tracker 'faulty_trackers:Hangs' did not end in time, so the run ends without it: it was in `finish`"
    assert said in ended.err
    read = EventAccumulator(str(run.directory / "tensorboard")).Reload()
    for name in ("reward/mean", "loss", "time/step"):
        assert [one.value for one in read.Scalars(name)] == pytest.approx([row[name] for row in run.metrics])
