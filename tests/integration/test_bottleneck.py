"""Where the time of a real run goes is found by the figures that it wrote."""

import json
import subprocess

import pytest

from .conftest import SMALL, Start
from .run_process import COMMAND

pytestmark = pytest.mark.slow


def test_a_slow_reward_is_what_a_run_waits_for(start: Start):
    run = start("train", *SMALL, "reward.function=rewards:slow", "train.steps=8")
    run.finished()
    used = {"generate", "reward", "old_logprobs", "reference", "advantage", "update", "sync", "step"}
    assert {*(f"time/{name}" for name in used), "busy/update", "rollout/busy_seconds", "rollout/utilisation"} <= set(
        run.metrics[-1]
    )
    told = subprocess.run([COMMAND, "bottleneck", run.directory, "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(told.stdout)
    assert next(iter(figures["shares"])) == "reward"
    assert figures["shares"]["reward"] > 0.5
    assert figures["advice"][0] | {"why": ""} == {"key": "reward.processes", "now": 1, "attempt": 2, "why": ""}
