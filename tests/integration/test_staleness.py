"""Generation that runs ahead of training loses nothing when a replica dies with work."""

import json
from collections import Counter
from pathlib import Path

import pytest

from .conftest import SMALL, installed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEATH = """
# Kills the worker of replica 0 as it is given requests for the first time.
import os, signal
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"
pids = []

@hookimpl
def enginehouse_run_started(run):
    pids.append(run.roles.rollout.pids[0])

@hookimpl
def enginehouse_call_dispatched(group, method):
    if pids and (group, method) == ("rollout-0", "draw"):
        os.kill(pids.pop(), signal.SIGKILL)
"""
STEPS, GROUPS, SAMPLES, STALENESS = 5, 67, 2, 2  # 201 requests are under way from the first step on


@pytest.fixture(scope="module")
def death(house: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(installed(house, "death", DEATH))}


@pytest.mark.parametrize("backend", ["torch", "vllm", "sglang"])
def test_a_replica_killed_with_requests_of_several_steps_loses_and_doubles_none(start, death, backend):
    run = start(
        "train",
        *SMALL,
        f"rollout.engine.backend={backend}",
        "rollout.placement=separate",
        "rollout.replicas=2",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"train.prompts_per_step={GROUPS}",
        f"train.steps={STEPS}",
        f"train.staleness={STALENESS}",
        "train.samples_every=1",
        env=death,
    )
    ended = run.finished(600)
    assert "rollout-0 is lost and is started again" in ended.err
    total = {name: sum(row[name] for row in run.metrics) for name in run.metrics[0] if name.startswith("rollout/")}
    assert total["rollout/restarts"] == 1
    assert total["rollout/retries"] > GROUPS
    rows = [
        json.loads(line)
        for step in range(1, STEPS + 1)
        for line in (run.directory / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
    ]
    lines = (run.directory.parents[1] / "examples/quickstart/work/train.jsonl").read_text().splitlines()
    counts = Counter(row["prompt"] for row in rows)
    assert set(counts.values()) == {SAMPLES}
    assert len(counts) == STEPS * GROUPS
    assert counts.keys() <= {json.loads(line)["prompt"] for line in lines}
    assert all(row["feed/left_over"] == 0 for row in run.metrics)
    assert all(row["rollout/recomputed_tokens"] >= 0 for row in run.metrics)
    assert max(row["staleness/max"] for row in run.metrics) <= STALENESS
