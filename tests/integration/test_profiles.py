"""Steps that a config names are profiled: torch's operators stand on the run's timeline where its phases have them."""

import gzip
import json
from typing import Any

import pytest

from .conftest import SMALL, Start

pytestmark = pytest.mark.slow

PLACED = {
    "inline": (("cluster.launcher=inline",), {"actor-0"}),
    "ray": (
        ("rollout.placement=separate", "rollout.replicas=2", "actor.processes=2"),
        {"actor-0", "actor-1", "rollout-0", "rollout-1"},
    ),
}


@pytest.mark.parametrize("launcher", PLACED)
def test_operators_lie_within_the_phases_that_ran_them(start: Start, launcher: str):
    overrides, files = PLACED[launcher]
    run = start("train", *SMALL, "train.steps=2", "train.profile_steps=[2]", *overrides)
    run.finished()
    profiles = run.directory / "profiles"
    assert [entry.name for entry in profiles.iterdir()] == ["step-000002"]
    assert {file.name for file in (profiles / "step-000002").iterdir()} == {f"{name}.json.gz" for name in files}
    for file in (profiles / "step-000002").iterdir():
        assert "traceEvents" in strict(gzip.decompress(file.read_bytes()).decode())
    events = strict((run.directory / "timeline.json").read_text())
    check_as_a_viewer_reads(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    own = [span for span in spans if processes[span["pid"]] == "enginehouse"]
    (step,) = (span for span in own if span["name"] == "step 2")
    phases = [span for span in own if span["tid"] == step["tid"] and within(span, step)]
    (update,) = (span for span in phases if span["name"] == "update")
    for name in files:
        role, _, rank = name.rpartition("-")
        (pid,) = (pid for pid, called in processes.items() if called.startswith(role) and called.endswith(rank))
        operators = [span for span in spans if span["pid"] == pid and span["name"].startswith("aten::")]
        inside = [span for span in operators if within(span, step)]
        assert inside
        assert inside == operators or role == "rollout", f"{name}: only what generates begins before the step"
        backward = [span for span in operators if span["name"].endswith("_backward")]
        assert bool(backward) == (role == "actor")
        assert all(within(span, update) for span in backward), name


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def check_as_a_viewer_reads(events: list[dict[str, Any]]) -> None:
    """Each span has its numbers and a row with a name, and spans of a row nest."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() == named
    for spans in rows.values():
        around: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1] <= begin + 0.05:
                around.pop()
            assert not around or end <= around[-1] + 0.05
            around.append(end)
