"""Planning a critic: there is one where the advantage needs values, in the actor's processes or others."""

import shutil
from collections.abc import Callable

import numpy as np
import pytest
from projects import Project, refusal
from safetensors.numpy import save_file

from enginehouse.errors import UserError
from enginehouse_rl.plan.plan import Plan
from enginehouse_testing.models import tiny_model, with_value_head

GAE = "algorithm.advantage.name=gae"


def test_an_advantage_that_needs_values_makes_a_critic_beside_the_actor(make: Callable[..., Plan]):
    planned = make(GAE, "actor.processes=2", "actor.engine.options.lr=1e-4")
    actor, critic = planned.roles["actor"], planned.roles["critic"]
    assert (critic.shares, critic.trained, critic.processes) == ("actor", True, 2)
    assert (critic.backend, critic.options) == (actor.backend, actor.options)
    assert (critic.model.path, critic.model.head, actor.model.head) == (actor.model.path, "value", "causal_lm")
    assert dict(planned.facts)["critic"] == "model, in the actor's processes; clipped_value loss"
    assert "critic" not in make().roles
    assert "critic" not in dict(make().facts)


def test_a_critic_may_have_options_of_its_own_in_the_actors_processes(make: Callable[..., Plan]):
    critic = make(GAE, "critic.shares=actor", "critic.engine.options.lr=1e-3", "cluster.launcher=inline").roles[
        "critic"
    ]
    assert (critic.shares, critic.options["lr"]) == ("actor", 1e-3)


def test_a_critic_that_does_not_follow_the_actors_backend_is_noted(make: Callable[..., Plan]):
    """Options of its own make it an engine of its own, whose backend is the default."""
    own = ["critic.shares=actor", "critic.engine.options.lr=1e-3"]
    said = (
        "critic.engine names no engine, so the default engine 'torch' runs the critic, and not 'fsdp', the engine "
        "of the actor. To use that one, set critic.engine.backend=fsdp"
    )
    fsdp = "actor.engine.backend=fsdp"
    planned = make(GAE, fsdp, *own)
    assert planned.roles["critic"].backend == "torch"
    assert said in planned.notes
    for settled in ([fsdp], [fsdp, *own, "critic.engine.backend=torch"], own):
        assert said not in make(GAE, *settled).notes
    followed = make(GAE, fsdp, *own, "critic.engine.backend=fsdp")
    assert (followed.roles["critic"].backend, said in followed.notes) == ("fsdp", False)


def test_roles_may_live_in_two_pools(make: Callable[..., Plan]):
    kl = "algorithm.kl={coefficient: 0.1, place: reward}"
    planned = make(GAE, kl, "critic.processes=2", "reference.shares=critic", "critic.warmup_steps=3")
    assert planned.roles["critic"].shares is None
    assert (planned.roles["reference"].shares, planned.roles["reference"].processes) == ("critic", 2)
    facts = dict(planned.facts)
    assert facts["critic"] == (
        "model: torch with the actor's options, 2 ranks, in separate processes; clipped_value loss; the "
        "actor is not trained in the first 3 steps"
    )
    assert facts["reference"].startswith("model, in the critic's processes; 0.1 times")


def test_schedules_end_with_the_run_and_the_actors_begins_after_the_critics_warm_up(make: Callable[..., Plan]):
    roles = make(GAE, "algorithm.epochs=3", "critic.warmup_steps=4").roles
    assert (roles["actor"].options["total_steps"], roles["critic"].options["total_steps"]) == (18, 30)
    assert make("algorithm.epochs=3", "critic.warmup_steps=4").roles["actor"].options["total_steps"] == 30


def test_a_critic_without_an_advantage_that_needs_values_is_noted(make: Callable[..., Plan]):
    said = "critic is set, but the advantage 'grpo' needs no values: no critic runs"
    assert said in make("critic.warmup_steps=2").notes
    assert said not in make().notes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["critic.warmup_steps=10"], "critic.warmup_steps must be less than train.steps (10), not 10: "),
        (["critic.shares=reference"], "critic.shares is reference, which is no role of this run that is placed before"),
        (
            ["critic.shares=critic"],
            "critic.shares is critic, which is no role of this run that is",
        ),
        (
            ["critic.loss.name=clipped_policy"],
            "critic.loss.name must be a loss of values, but 'clipped_policy' is a loss of logprobs: ",
        ),
        (
            ["algorithm.loss.name=clipped_value"],
            "algorithm.loss.name must be a loss of logprobs, but 'clipped_value' is",
        ),
        (["critic.shares=actor", "critic.processes=2"], "critic.processes is 2, but critic.shares is actor"),
        (["critic.engine.backend=fdsp"], "critic.engine.backend: "),
        (["critic.loss.name=clipped_valeu"], "critic.loss.name"),
        (["critic.loss.arguments.clop=1"], "critic.loss.arguments"),
        (["critic.path=nowhere"], "critic.path: "),
        (["critic.processes=33"], "fewer than the 33 processes of the critic (critic.processes)"),
        (["critic.processes=1", "cluster.launcher=inline"], "critic.processes: the critic needs its own processes"),
    ],
)
def test_a_critic_that_cannot_be_is_refused(make: Callable[..., Plan], overrides: list[str], said: str):
    assert said in refusal(make, GAE, *overrides)


def test_a_critic_of_another_vocabulary_is_refused(make: Callable[..., Plan], project: Project):
    project.make_model("other", vocab_size=32)
    with pytest.raises(UserError, match=r"critic\.path: other has a vocabulary of 32 tokens, but model\.path has 31"):
        make(GAE, "critic.path=other")


def test_an_engine_without_value_heads_is_refused(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_rl.plan.parts.engines.VALUE_HEAD", "no_backend_has_it")
    with pytest.raises(UserError, match=r"critic\.engine\.backend: engine 'torch' cannot train a value head"):
        make(GAE)


def test_a_reward_model_runs_where_it_has_a_path(make: Callable[..., Plan], project: Project):
    project.make_model("judge")
    planned = make(GAE, "critic.processes=2", "reward_model={path: judge, shares: critic, weight: 0.5}")
    role = planned.roles["reward_model"]
    assert (role.shares, role.processes, role.trained, role.model.head) == ("critic", 2, False, "value")
    assert dict(planned.facts)["reward model"] == (
        "judge, in the critic's processes; 0.5 times its score is added to the reward"
    )
    assert "reward_model" not in make(GAE).roles


def test_a_reward_model_that_pads_with_its_end_is_said_to_be_scored_at_the_end(make, project):
    project.make_model("judge", pad_token_id=2, eos_token_id=[1, 2])
    project.make_model("other", pad_token_id=0, eos_token_id=2)

    def noted(path: str) -> list[str]:
        return [note for note in make(f"reward_model.path={path}").notes if "token for padding" in note]

    assert len(noted("judge")) == 1
    assert noted("other") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward_model.weight=2"], "reward_model is set, but has no path"),
        (["reward_model.path=nowhere"], "reward_model.path: "),
        (["reward_model.path=judge", "rollout.keep.name=mixed_rewards"], "rollout.keep: mixed_rewards needs the"),
        (["reward_model.path=short"], "reward_model.path: the model has 24 positions (max_position_embeddings), but a "
         "sample may need 25"),
    ],
)  # fmt: skip
def test_a_reward_model_that_cannot_be_is_refused(make, project, overrides, said):
    project.make_model("judge")
    project.make_model("short", max_position_embeddings=24)
    assert said in refusal(make, *overrides)


def test_a_reward_model_may_score_alone(make: Callable[..., Plan], project: Project):
    project.make_model("judge")
    del project.config["reward"]
    planned = make("reward_model.path=judge")
    assert planned.rewards == ()
    assert "reward" not in dict(planned.facts)
    with pytest.raises(UserError, match=r"set reward\.function, several under reward\.functions, or reward_model"):
        make()


def test_a_reward_model_without_a_head_is_refused(make: Callable[..., Plan], project: Project):
    shutil.copytree(with_value_head(tiny_model(vocabulary=31)), project.root / "judge")
    save_file({"lm_head.weight": np.zeros((1, 4), np.float32)}, project.make_model("policy") / "model.safetensors")
    assert make("reward_model.path=judge").roles["reward_model"]
    with pytest.raises(UserError, match=r"reward_model\.path must be a sequence classifier .* but policy has no score"):
        make("reward_model.path=policy")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["name=gdpo", "kl={coefficient: 0.1, place: reward}"], "but the advantage 'gdpo' does not read the reward"),
        (["name=distillation", "kl={coefficient: 0.1, place: reward}"], "but the advantage 'distillation' does not"),
        (["name=gdpo", "weight=0.0"], "reads each reward separately, before weight and normalize are applied"),
        (["name=gdpo", "normalize=group"], "reads each reward separately, before weight and normalize are applied"),
        (
            ["name=gdpo", "each=[1, 2]"],
            "arguments.weights must have a number for each reward: it has 2 numbers, but the number of rewards is 1",
        ),
        (["name=gdpo", "model=2.0"], "reads each reward separately, before weight and normalize are applied"),
        (["name=remax", "normalize=batch"], "gets no normalized reward and no score of a reward model"),
        (["name=remax", "model=1.0"], "gets no normalized reward and no score of a reward model"),
    ],
)
def test_what_an_advantage_would_not_read_of_the_rewards_is_refused(make, project, overrides, said):
    project.make_model("judge")
    project.config["reward"] = {"functions": {"right": {"function": "scoring:right"}}}
    keys = {
        "name": "algorithm.advantage.name",
        "kl": "algorithm.kl",
        "each": "algorithm.advantage.arguments.weights",
        "weight": "reward.functions.right.weight",
        "normalize": "reward.functions.right.normalize",
    }
    given = []
    for key, _, value in (one.partition("=") for one in overrides):
        given += (
            [f"{keys[key]}={value}"] if key in keys else ["reward_model.path=judge", f"reward_model.weight={value}"]
        )
    assert said in refusal(make, *given)
