"""A run's trackers get its metrics, and nothing that they do ends the run or holds it up."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.config.earlier_run import read_record
from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse_rl.runs import RunDirectory, tracking

MANY = 30.0
"""Seconds that a test waits for what comes at once."""


class Keeps:
    """Keeps what it is told."""

    told: ClassVar[list] = []

    def __init__(self, **arguments):
        self.told.append(("made", arguments))

    def start(self, run):
        self.told.append(("start", run))

    def log(self, step, metrics, kind):
        self.told.append((kind, step, dict(metrics)))
        metrics.clear()  # another tracker's are its own

    def finish(self, outcome):
        self.told.append(("finish", outcome))


class KeepsToo(Keeps):
    told: ClassVar[list] = []


class Raises(Keeps):
    """Raises in the call that it is told to, by anything that can be raised."""

    told: ClassVar[list] = []

    def __init__(self, where, error=RuntimeError):
        super().__init__()
        self.where, self.error = where, error
        self.raise_in("__init__")

    def start(self, run):
        super().start(run)
        self.raise_in("start")

    def log(self, step, metrics, kind):
        super().log(step, metrics, kind)
        self.raise_in("log")

    def finish(self, outcome):
        super().finish(outcome)
        self.raise_in("finish")

    def raise_in(self, where):
        if where == self.where:
            raise self.error("the disk of the service is full")


class Hangs(Keeps):
    """Hangs in the call that it is told to, until it is let go."""

    told: ClassVar[list] = []
    begun, let_go = threading.Event(), threading.Event()

    def __init__(self, where):
        self.where = where

    def log(self, step, metrics, kind):
        super().log(step, metrics, kind)
        self.hang_in("log")

    def finish(self, outcome):
        self.hang_in("finish")
        super().finish(outcome)

    def hang_in(self, where):
        if where == self.where:
            self.begun.set()
            self.let_go.wait(MANY)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    for kind in (Keeps, KeepsToo, Raises, Hangs):
        kind.told.clear()
    monkeypatch.setattr(tracking, "abandoned", [])
    Hangs.begun.clear()
    Hangs.let_go.clear()
    yield
    Hangs.let_go.set()


@pytest.fixture
def here(monkeypatch):
    """The trackers of this module, by what a plan says of them."""
    monkeypatch.setattr(tracking, "resolve", globals().__getitem__)
    return lambda kind, **arguments: TrackerPlan(kind.__name__.lower(), kind.__name__, arguments)


def make_run(path: Path, *trackers: TrackerPlan, config: str = "a: {b: 1}\n", **details) -> RunDirectory:
    return RunDirectory.create(path / "one", config, trackers=trackers, **details)


def rows_of(run: RunDirectory, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (run.path / name).read_text().splitlines()]


def test_a_tracker_is_told_all_there_is_in_order_and_by_one_thread(tmp_path: Path, here):
    run = make_run(tmp_path, here(Keeps, colour="red"), here(KeepsToo))
    run.log_validation(0, {"validation/reward": 0.25})
    run.log(1, {"reward/mean": 0.5, "loss": float("inf"), "said": "a word"})
    run.log_validation(1, {"validation/reward": 0.5})
    run.finish("finished")
    made, (_, facts), *logged = Keeps.told
    assert made == ("made", {"colour": "red"})
    assert logged == [
        ("validation", 0, {"validation/reward": 0.25}),
        ("train", 1, {"reward/mean": 0.5, "loss": float("inf")}),
        ("validation", 1, {"validation/reward": 0.5}),
        ("finish", "finished"),
    ]
    assert KeepsToo.told[2:] == logged
    assert (facts.name, facts.directory, facts.config, facts.resumed_after) == ("one", run.path, {"a": {"b": 1}}, 0)
    assert facts.versions["torch"]


@pytest.mark.fault(
    area="plugins",
    what="a tracker raises, in any of its calls",
    happens=(
        "the run reports it once, with its traceback, and no longer calls it. The run and other trackers continue"
    ),
    exit_code="0",
    kept="everything; `metrics.jsonl` has all rows",
    noticed="at once",
)
@pytest.mark.parametrize("where", ["__init__", "start", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_tracker_that_raises_is_said_once_and_not_called_again(tmp_path: Path, here, caplog, where, error):
    run = make_run(tmp_path, here(Raises, where=where, error=error), here(Keeps))
    for step in (1, 2, 3):
        run.log(step, {"loss": 1.0})
    run.finish("finished")
    order = ["made", "start", "train", "finish"]
    begun, last = {"__init__": "start"}.get(where, where), {"__init__": "made", "log": "train"}.get(where, where)
    heard = list(dict.fromkeys(one[0] for one in Raises.told))
    assert heard == order[: order.index(last) + 1]
    assert where != "log" or len(Raises.told) == 3
    (said,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "the tracker 'raises' raised" in said.getMessage()
    assert json.loads((run.path / "run.json").read_text())["trackers"] == {
        "raises": f"it raised in `{begun}`: {error.__name__}: the disk of the service is full"
    }
    assert "the disk of the service is full" in said.getMessage()
    assert said.exc_info is not None
    assert len(Keeps.told) == 6
    assert rows_of(run) == [1, 2, 3]
    assert read_record(run.path)["status"] == "finished"


@pytest.mark.fault(
    area="plugins",
    what="a tracker hangs, in any of its calls",
    happens="no step waits for it. The end of the run waits 30 s (3 s after an interruption), and then says so",
    exit_code="0",
    kept="everything; `metrics.jsonl` has all rows",
    noticed="at the end of the run",
)
def test_a_tracker_that_hangs_holds_up_no_step_and_is_left_at_the_end(tmp_path: Path, here, caplog, monkeypatch):
    monkeypatch.setattr("enginehouse_rl.runs.tracking.ENDING_SECONDS", 0.2)
    run = make_run(tmp_path, here(Hangs, where="log"), here(Keeps))
    run.log(1, {"loss": 1.0})
    assert Hangs.begun.wait(MANY)
    for step in (2, 3):
        run.log(step, {"loss": 1.0})
    began = time.monotonic()
    run.finish("finished")
    assert time.monotonic() - began < MANY / 2
    assert Keeps.told[-1] == ("finish", "finished")
    (said,) = [one.getMessage() for one in caplog.records]
    assert "the tracker 'hangs' did not end in time, so the run ends without it: it was in `log`, and 2 rows" in said
    assert tracking.abandoned == ["hangs"]
    assert rows_of(run) == [1, 2, 3]
    assert read_record(run.path)["status"] == "finished"
    RunDirectory.create(run.path, "", overwrite=True).finish("finished")  # it does not keep the directory either


def test_one_that_hangs_in_its_end_is_left_with_no_row_waiting(tmp_path: Path, here, caplog, monkeypatch):
    monkeypatch.setattr("enginehouse_rl.runs.tracking.ENDING_SECONDS", 0.2)
    run = make_run(tmp_path, here(Hangs, where="finish"))
    run.log(1, {"loss": 1.0})
    run.finish("failed", "why")
    assert "it was in `finish`, and 0 rows of metrics waited" in caplog.text


def test_whoever_interrupts_a_run_waits_less(tmp_path: Path, here, monkeypatch):
    monkeypatch.setattr("enginehouse_rl.runs.tracking.HURRY_SECONDS", 0.1)
    run = make_run(tmp_path, here(Hangs, where="finish"))
    began = time.monotonic()
    run.finish("interrupted")
    assert time.monotonic() - began < tracking.ENDING_SECONDS / 2


@pytest.mark.fault(
    area="plugins",
    what="a tracker is slower than the run",
    happens="1,000 rows wait for it and further rows are dropped. The end of the run says how many",
    exit_code="0",
    kept="everything; `metrics.jsonl` has all rows",
    noticed="at the end of the run",
)
def test_rows_beyond_those_that_may_wait_are_dropped_and_counted(tmp_path: Path, here, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "MOST_WAITING", 5)
    run = make_run(tmp_path, here(Hangs, where="log"))
    run.log(1, {"loss": 1.0})
    assert Hangs.begun.wait(MANY)
    for step in range(2, 10):
        run.log(step, {"loss": 1.0})
    Hangs.let_go.set()
    run.finish("finished")
    assert "the tracker 'hangs' was too slow: 3 rows of metrics were dropped" in caplog.text
    assert [one[1] for one in Hangs.told if one[0] == "train"] == [1, 2, 3, 4, 5, 6]
    assert rows_of(run) == list(range(1, 10))


def test_a_resumed_run_says_where_it_goes_on_from(tmp_path: Path, here):
    first = make_run(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"loss": 1.0})
    first.finish("failed", "killed")
    checkpoint = Checkpoint(first.path, 2, 0.0, {}, {}, "train", record=read_record(first.path))
    run = make_run(tmp_path, here(Keeps), resumed=checkpoint)
    run.log(3, {"loss": 2.0})
    run.finish("finished")
    assert Keeps.told[1][1].resumed_after == 2
    assert Keeps.told[2] == ("train", 3, {"loss": 2.0})


def test_a_secret_reaches_the_tracker_and_no_file(tmp_path: Path, here, monkeypatch):
    monkeypatch.setenv("TRACKER_KEY", "hush-hush")
    config = "run: {trackers: [{name: keeps, arguments: {api_key: '${TRACKER_KEY}'}}]}\n"
    given = {"api_key": "${TRACKER_KEY}", "headers": {"Authorization": "Bearer ${TRACKER_KEY}"}}
    run = make_run(tmp_path, here(Keeps, **given), config=config)
    run.finish("finished")
    (_, arguments), (_, facts), _ = Keeps.told
    assert arguments == {"api_key": "hush-hush", "headers": {"Authorization": "Bearer hush-hush"}}
    assert "hush-hush" not in repr(facts)
    assert "${TRACKER_KEY}" in repr(facts.config)
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"hush-hush" in path.read_bytes()]
