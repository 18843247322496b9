"""Profiles: torch's own trace of a process, and what of it is drawn on a run's timeline."""

import gzip
import json
import logging
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginehouse.engines.model import ProcessContext
from enginehouse.roles import profiles as profiles_module
from enginehouse.roles.profiles import begin_profile, end_profile, stop_profile
from enginehouse_rl.loop.profiles import Profiles
from enginehouse_rl.runs import Timeline

CONTEXT = ProcessContext(role="actor", node="here", device="cpu", labels={"roles": ("actor", "rollout")})


class Group:
    """A role of this process."""

    def __init__(self, context: ProcessContext = CONTEXT):
        self.context, self.called = context, []

    def call(self, method: str, *args: Any) -> list[Any]:
        self.called.append(method)
        if method == "profile_begin":
            return [begin_profile(self.context)]
        return [end_profile(self.context, 0, *args)]


def roles(*groups: Group) -> Any:
    plans = {str(number): SimpleNamespace(processes=1) for number, _ in enumerate(groups)}
    return SimpleNamespace(groups=dict(enumerate(groups)), fleets={}, plans=plans)


def run(path: Path) -> Any:
    return SimpleNamespace(path=path, timeline=Timeline(path / "timeline.json"))


def test_a_step_that_is_not_named_is_not_looked_at():
    nothing: Any = None  # which has no roles, and no directory
    with Profiles([2], nothing).step(1, nothing):
        pass


def test_a_step_is_drawn_where_it_was_and_its_file_is_whole(tmp_path: Path):
    here = run(tmp_path)
    thread = ThreadPoolExecutor(1)
    thread.submit(int).result()  # it is there before the profiler, as that of a rollout engine
    with thread, Profiles([3], here).step(3, roles(Group(), Group())):
        inside = time.monotonic()
        torch.randn(60, 60) @ torch.randn(60, 60)
        thread.submit(torch.hann_window, 50).result()
        ended = time.monotonic()
    here.timeline.span("around", inside, ended)
    here.timeline.close()
    (file,) = (tmp_path / "profiles" / "step-000003").iterdir()
    assert file.name == "actor-0.json.gz"
    whole = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    events = json.loads((tmp_path / "timeline.json").read_text())
    drawn = {event["name"]: event for event in events if event["ph"] == "X" and event["pid"] > 1}
    assert {"aten::randn", "aten::matmul", "aten::hann_window"} <= drawn.keys() & {event["name"] for event in whole}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["enginehouse", "actor, rollout rank 0"]
    (around,) = (event for event in events if event["name"] == "around")
    for name in ("aten::randn", "aten::matmul"):
        span = drawn[name]
        assert around["ts"] - 1e3 < span["ts"] < span["ts"] + span["dur"] < around["ts"] + around["dur"] + 1e3
    assert drawn["profile of step 3"]["args"]["trace"] == str(file)
    assert drawn["profile of step 3"]["ts"] <= span["ts"]


def test_the_longest_are_drawn_and_the_others_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_rl.loop.profiles.MOST_SPANS", 3)
    here = run(tmp_path)
    with Profiles([1], here).step(1, roles(Group())):
        torch.randn(300, 300) @ torch.randn(300, 300)
        torch.zeros(1)
    here.timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert len(names) == 4
    assert "aten::matmul" in names
    assert "aten::zeros" not in names
    (top,) = (event for event in events if event["name"] == "profile of step 1")
    assert top["args"]["shorter_spans_left_out"] > 3


def test_a_profile_that_fails_is_said_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    here = run(tmp_path)
    (tmp_path / "profiles").write_text("no folder")
    with caplog.at_level(logging.WARNING), Profiles([1], here).step(1, roles(Group())):
        pass
    assert "step 1: no profile of actor, rollout rank 0: " in caplog.text


def test_a_profiler_of_somebody_elses_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    here = run(tmp_path)
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs,
        caplog.at_level(logging.WARNING),
        Profiles([1], here).step(1, roles(Group())),
    ):
        torch.zeros(1)
    assert "step 1: no profile of actor, rollout rank 0: another profiler already runs in its process" in caplog.text
    assert any(event.key == "aten::zeros" for event in theirs.key_averages())


def test_what_a_step_that_failed_leaves_is_stopped(tmp_path: Path):
    group = Group()
    with suppress(KeyError), Profiles([1], run(tmp_path)).step(1, roles(group)):
        raise KeyError
    assert group.called == ["profile_begin"]
    stop_profile()
    begin_profile(CONTEXT)
    assert end_profile(CONTEXT, 0, str(tmp_path / "again"), 10).problem == ""  # type: ignore[union-attr]


def test_a_profiler_that_does_not_stop_keeps_no_engine_from_being_released(monkeypatch: pytest.MonkeyPatch):
    def stop() -> None:
        raise RuntimeError("the profiler is gone")

    monkeypatch.setattr(profiles_module, "_under_way", [SimpleNamespace(stop=stop)])
    stop_profile()
    assert profiles_module._under_way == []


def trace_of(events: list[dict[str, Any]], end: str = '],"traceName": "[1]"}') -> Any:
    """A profiler that saw these, and writes them as torch does."""

    head = '{"schemaVersion": 1, "deviceProperties": [{"id": 0}], "baseTimeNanoseconds": 5000, "traceEvents": ['
    text = gzip.compress((head + ",\n".join(json.dumps(event, indent=1) for event in events) + end).encode())
    return SimpleNamespace(stop=lambda: None, export_chrome_trace=lambda path: Path(path).write_bytes(text))


def test_of_a_trace_no_more_is_held_at_once_than_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copies = [
        {"ph": "X", "cat": "kernel", "name": f"copy {number}]}},", "pid": 0, "tid": 7, "ts": number, "dur": number / 8}
        for number in range(8000)
    ]
    others = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, {"ph": "X", "cat": "ac2g", "dur": 1e9}]
    monkeypatch.setattr(profiles_module, "_under_way", [trace_of([*others, *copies])])
    tracemalloc.start()
    profile = end_profile(CONTEXT, 0, str(tmp_path), 2)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert profile is not None
    assert list(profile.spans) == [
        ("gpu 0 stream 7", "copy 7999]},", 5000 + 7_999_000, 999_875),
        ("gpu 0 stream 7", "copy 7998]},", 5000 + 7_998_000, 999_750),
    ]
    assert profile.left_out == 7998
    assert most < 2.5e6  # bytes; all events as Python has them are twice that


@pytest.mark.parametrize("end", ["", ", ", ', {"ph": "X"'])
def test_a_trace_that_was_cut_off_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str):
    monkeypatch.setattr(profiles_module, "_under_way", [trace_of([{"ph": "M"}], end)])
    assert end_profile(CONTEXT, 0, str(tmp_path), 2).problem  # type: ignore[union-attr]
