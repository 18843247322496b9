"""The quickstart with FSDP here and vLLM in its own Python environment: it learns, and says what each ran on."""

from __future__ import annotations

import pytest

from .conftest import QUICKSTART, Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_fsdp_trains_and_vllm_generates_each_in_its_own_environment(start: Start):
    warm_up = start("sft", config=QUICKSTART / "sft.yaml", name="quickstart-sft").finish(300)
    assert warm_up.code == 0, warm_up.err
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
