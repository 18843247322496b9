"""One run in three Python environments: FSDP trains here, SGLang draws samples, vLLM answers validation prompts."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("steps", "reward"),
    [
        pytest.param(4, 0.0, marks=pytest.mark.essential),
        pytest.param(120, 0.85, marks=pytest.mark.exhaustive),
    ],
    ids=["runs", "learns"],
)
def test_an_actor_a_rollout_and_an_evaluation_each_in_its_own_environment(start, warmed_up, tmp_path, steps, reward):
    run = start(
        "train",
        "actor.engine.backend=fsdp",
        "rollout.engine.backend=sglang",
        "evaluation.engine.backend=vllm",
        f"train.steps={steps}",
        f"train.validate_every={steps // 2}",
        "evaluation.sampling.temperature=1",  # as in training, where one sample in fifty is right at first
        *(["actor.engine.options.schedule=constant"] if steps < 120 else []),
        env={"VLLM_CACHE_ROOT": str(tmp_path)},  # as at a user's first run: vLLM keeps what it found out of a model
    )
    run.finished(1500)
    rewards = [line["reward/mean"] for line in run.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= reward, rewards
    assert max(line["mismatch/absolute_mean"] for line in run.metrics) <= 1e-4
    judged = {line["step"]: line["validation/reward"] for line in run.validations}
    assert sorted(judged) == [0, steps // 2, steps]
    assert judged[0] <= 0.10
    assert judged[steps] >= reward - 0.04
    roles = {role: run.record["roles"][role][0] for role in ("actor", "rollout", "evaluation")}
    assert len({one["interpreter"] for one in roles.values()}) == 3
    assert [one["engine"].split()[0] for one in roles.values()] == ["FSDPEngine", "sglang", "vllm"]
    assert all(one["torch"] and one["python"] for one in roles.values())
