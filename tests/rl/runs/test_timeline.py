"""The timeline is a Chrome trace that is valid JSON at every moment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from enginehouse_rl.runs import StepClock, Timeline
from enginehouse_rl.runs import timeline as timeline_module


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def tracks(path: Path) -> dict[str, int]:
    events = json.loads(path.read_text())
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}


def test_it_is_valid_before_the_first_span_and_after_every_write(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    assert spans(timeline.path) == []
    for n in range(3):
        timeline.span(f"step {n}", time.monotonic(), time.monotonic())
        timeline.flush()
        assert len(spans(timeline.path)) == n + 1
    timeline.close()
    assert [span["name"] for span in spans(timeline.path)] == ["step 0", "step 1", "step 2"]


def test_spans_have_microseconds_from_the_start(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    now = time.monotonic()
    timeline.span("work", now + 1, now + 1.5, tokens=3)
    timeline.close()
    (span,) = spans(timeline.path)
    assert span["dur"] == pytest.approx(5e5)
    assert span["ts"] == pytest.approx(1e6, abs=2e5)
    assert span["args"] == {"tokens": 3}


def test_calls_that_overlap_get_rows_of_their_own(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    second = 1_000_000_000
    start = time.monotonic_ns()
    timeline.call("actor", "forward", 0, start, start + second)
    timeline.call("actor", "forward", 1, start + second // 2, start + 2 * second)
    timeline.call("actor", "update", 2, start + 2 * second, start + 3 * second)
    timeline.close()
    rows = tracks(timeline.path)
    assert set(rows) == {"actor", "actor (2)"}
    assert [span["tid"] for span in spans(timeline.path)] == [rows["actor"], rows["actor (2)"], rows["actor"]]


def test_threads_may_draw_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_module, "FLUSH_SECONDS", 0.0)
    timeline = Timeline(tmp_path / "t.json")

    def draw(track: str) -> None:
        for _ in range(50):
            timeline.span("work", time.monotonic(), time.monotonic(), track)

    threads = [threading.Thread(target=draw, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert len(spans(timeline.path)) == 200


def test_rows_of_another_process_are_its_own_also_in_a_run_that_goes_on(tmp_path: Path):
    now = time.monotonic()
    timeline = Timeline(tmp_path / "t.json")
    timeline.span("update", now, now)
    timeline.span("mm", now, now, "controller", process="actor rank 0")
    timeline.close()
    timeline = Timeline(tmp_path / "t.json", before=1000.0)
    timeline.span("add", now, now, "controller", process="actor rank 0")
    timeline.span("add", now, now, "controller", process="actor rank 1")
    timeline.close()
    events = json.loads(timeline.path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "enginehouse", 2: "actor rank 0", 3: "actor rank 1"}
    assert [(span["name"], span["pid"]) for span in spans(timeline.path)] == [
        ("update", 1), ("mm", 2), ("add", 2), ("add", 3)
    ]  # fmt: skip
    rows = {(span["pid"], span["tid"]) for span in spans(timeline.path)}
    assert len(rows) == len({row for _, row in rows}) == 3


def test_spans_that_nest_do_so_as_they_are_written(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    now = time.monotonic()
    for nanoseconds in range(40, 1000, 37):
        end = now + 1e-6 + nanoseconds * 1e-9
        timeline.span("inner", now + 1e-6, end, str(nanoseconds))
        timeline.span("outer", now, end, str(nanoseconds))
    timeline.close()
    drawn = spans(timeline.path)
    for inner, outer in zip(drawn[::2], drawn[1::2], strict=True):
        assert inner["ts"] + inner["dur"] == pytest.approx(outer["ts"] + outer["dur"], abs=1e-4)


def test_a_timeline_that_grows_too_long_stops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline_module, "MOST_SPANS", 10)
    timeline = Timeline(tmp_path / "t.json")
    for _ in range(30):
        timeline.span("work", 0.0, 0.0)
    timeline.close()
    assert len(spans(timeline.path)) <= 10
    assert "later spans left out" in timeline.path.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_kills_the_process_all_that_was_written_can_be_read(tmp_path: Path, number: signal.Signals):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from pathlib import Path\n"
        "from enginehouse_rl.runs import StepClock, Timeline, timeline\n"
        "timeline.FLUSH_SECONDS = 0.0\n"
        "clock = StepClock(Timeline(Path(sys.argv[1])))\n"
        "step = 0\n"
        "while True:\n"
        "    with clock.step(step):\n"
        "        with clock.phase('generate'):\n"
        "            step += 1\n"
        "    if step == 100: print('going', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "t.json")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, number)
    process.wait()
    process.stdout.close()
    whole, _, last = (tmp_path / "t.json").read_text().rstrip("]\n").rpartition("\n")
    events = json.loads(whole.rstrip(",") + "]")  # all lines but the last are whole, however it was killed
    assert len([event for event in events if event["ph"] == "X"]) >= 199
    if number == signal.SIGINT:
        json.loads(last)


def test_a_clock_sums_phases_and_draws_them(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    clock = StepClock(timeline)
    with clock.phase("before"):
        pass
    with clock.step(7):
        with clock.phase("generate"):
            pass
        with clock.phase("generate"):
            pass
    metrics = clock.metrics()
    assert set(metrics) == {"time/step", "time/generate"}
    assert 0 < metrics["time/generate"] <= metrics["time/step"]
    timeline.close()
    assert [span["name"] for span in spans(timeline.path)] == ["before", "generate", "generate", "step 7"]


def test_a_phase_that_raises_is_drawn_and_raises(tmp_path: Path):
    timeline = Timeline(tmp_path / "t.json")
    clock = StepClock(timeline)
    with pytest.raises(KeyboardInterrupt), clock.step(1), clock.phase("generate"):
        raise KeyboardInterrupt
    timeline.close()
    assert [span["name"] for span in spans(timeline.path)] == ["generate", "step 1"]
