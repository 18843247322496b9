"""The quickstart with FSDP here and vLLM in its own Python environment: it learns, and says what each ran on."""

import pytest

from .conftest import SHORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("overrides", "reward"),
    [(SHORT, 0.2), pytest.param(("train.steps=120",), 0.85, marks=pytest.mark.exhaustive)],
    ids=["begins", "learns"],
)
def test_fsdp_trains_and_vllm_generates_each_in_its_own_environment(start, warmed_up, overrides, reward):
    endpoint = "rollout.engine.options.openai_endpoint=loopback"
    engines = ("actor.engine.backend=fsdp", "rollout.engine.backend=vllm", endpoint)
    run = start("train", *engines, *overrides)
    ended = run.finished(600)
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= reward, rewards
    (actor,), (rollout,) = (run.record["roles"][role] for role in ("actor", "rollout"))
    assert rollout["engine"].startswith("vllm ")
    assert actor["interpreter"] != rollout["interpreter"]
    assert actor["transformers"] != rollout["transformers"]
    assert f"OpenAI clients at {rollout['endpoint']}\n" in ended.out
    assert max(line["mismatch/absolute_mean"] for line in run.metrics) <= 1e-4
