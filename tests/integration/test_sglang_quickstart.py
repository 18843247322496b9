"""The quickstart with FSDP here and SGLang in its own Python environment: it learns, and says what each ran on."""

from __future__ import annotations

import os

import pytest

from .conftest import Start
from .run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUNTIME = os.environ.get("ENGINEHOUSE_TEST_SGLANG_RUNTIME", "auto")


def test_fsdp_trains_and_sglang_generates_each_in_its_own_environment(start: Start, warmed_up: RunProcess):
    run = start(
        "train",
        "actor.engine.backend=fsdp",
        "rollout.engine.backend=sglang",
        f"rollout.engine.runtime={RUNTIME}",
        "train.steps=120",
    )
    ended = run.finish(1500)
    assert ended.code == 0, ended.err
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= 0.85, rewards
    (actor,), (rollout,) = (run.record["roles"][role] for role in ("actor", "rollout"))
    assert rollout["engine"].startswith("sglang ")
    assert actor["interpreter"] != rollout["interpreter"]
    assert max(line["mismatch/absolute_mean"] for line in run.metrics) <= 1e-4
