"""The quickstart with FSDP here and vLLM in its own Python environment: it learns, and says what each ran on."""

from __future__ import annotations

import pytest

from .conftest import Start
from .run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_fsdp_trains_and_vllm_generates_each_in_its_own_environment(start: Start, warmed_up: RunProcess):
    endpoint = "rollout.engine.options.openai_endpoint=loopback"
    run = start("train", "actor.engine.backend=fsdp", "rollout.engine.backend=vllm", endpoint, "train.steps=120")
    ended = run.finish(600)
    assert ended.code == 0, ended.err
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= 0.85, rewards
    (actor,), (rollout,) = (run.record["roles"][role] for role in ("actor", "rollout"))
    assert rollout["engine"].startswith("vllm ")
    assert actor["interpreter"] != rollout["interpreter"]
    assert actor["transformers"] != rollout["transformers"]
    assert f"OpenAI clients at {rollout['endpoint']}\n" in ended.out
    assert max(line["mismatch/absolute_mean"] for line in run.metrics) <= 1e-4
