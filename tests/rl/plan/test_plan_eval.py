"""Plans of evaluations without a run: what is looked at, what runs, and where it is written."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from game_environments import Counting
from projects import Project

from enginehouse.engines.environment import Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.errors import ConfigError, ModelError, UserError
from enginehouse.plugin import load_plugins
from enginehouse_rl.config.load import load_config
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import TaskKind, make_runner
from enginehouse_rl.episodes.traces import EpisodeActivity
from enginehouse_rl.plan.plan import EvalPlan, plan_eval


@pytest.fixture
def make(project: Project):
    """Plans an evaluation of the project's model, or of another."""
    plugins = load_plugins(enabled=("torch",))
    project.config["data"]["validation"] = "held_out.jsonl"
    project.write_rows("held_out.jsonl", [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(6)])

    def make(*overrides: str, model: str | None = None) -> EvalPlan:
        path = project.save()
        return plan_eval(load_config(path, overrides), plugins, path, overrides, model)

    return make


def trained_run(project: Project, *steps: int, best: int | None = None) -> Path:
    """What a run leaves: models of steps, a link to the newest, the record."""
    run = project.root / "runs" / "one"
    (run / "models").mkdir(parents=True)
    for step in steps:
        project.make_model(f"runs/one/models/step-{step:06d}")
    (run / "model").symlink_to(f"models/step-{steps[-1]:06d}")
    if best is not None:
        project.make_model("runs/one/models/best")
    (run / "run.json").write_text(json.dumps({"status": "finished", "best": {"step": best, "value": 1.0}}))
    return run


def test_only_what_generates_runs_and_only_held_out_prompts_are_read(make, project: Project):
    (project.root / "train.jsonl").unlink()
    planned = make("reference.path=gone", "algorithm.kl.coefficient=0.1", "critic.path=gone", "rollout.replicas=2")
    assert list(planned.roles) == ["rollout"]
    rollout = planned.roles["rollout"]
    assert (rollout.processes, rollout.shares, rollout.trained, rollout.transport) == (2, None, False, None)
    said = planned.render()
    assert "6 of held_out.jsonl, answered greedily: 6 answers" in said
    assert "the served weights are read back and compared" in said
    assert "--resume" not in said


def test_an_engine_for_validations_is_what_evaluates(make):
    planned = make("evaluation.engine={backend: torch, options: {max_running: 3}}")
    assert planned.roles["rollout"].options["max_running"] == 3


@pytest.mark.parametrize("where", ["", "shares: critic, ", "processes: 1, ", "engine: {backend: torch}, "])
def test_a_reward_model_has_processes_of_its_own_as_nobody_is_there_to_share_them(make, project: Project, where: str):
    project.make_model("judge", architectures=["Qwen3ForSequenceClassification"])
    role = make(f"reward_model={{{where}path: judge}}").roles["reward_model"]
    assert (role.shares, role.processes, role.model.head, role.trained) == (None, 1, "value", False)
    assert role.model.path == str(project.root / "judge")


def test_a_run_stands_for_its_newest_model_and_a_model_of_a_run_for_its_step(make, project: Project):
    run = trained_run(project, 2, 10, best=2)
    newest = make(model="runs/one")
    assert (newest.config.model.path, newest.step) == ("runs/one/models/step-000010", 10)
    assert newest.run_directory == project.root / "runs" / "eval-one-step-000010"
    assert make("model.path=runs/one/models/step-000002").step == 2
    assert make(model=str(run / "models" / "best")).step == 2
    (run / "model").unlink()  # a file system may have no links
    assert make(model="runs/one").step == 10
    alone = make()
    assert (alone.step, alone.run_directory) == (0, project.root / "runs" / "eval-model")


def test_an_evaluation_writes_beside_the_configs_run_and_never_over_anything(make, project: Project):
    (project.root / "runs" / "eval-model").mkdir(parents=True)
    assert make().run_directory.name == "eval-model-2"
    assert make("run.directory=runs/mine").run_directory.name == "mine"
    run = trained_run(project, 3)
    with pytest.raises(ConfigError, match="holds models or checkpoints of a training run"):
        make("run.directory=runs/one", "run.overwrite=true")
    assert (run / "models" / "step-000003").is_dir()


def test_a_run_without_a_model_is_refused(make, project: Project):
    (project.root / "runs" / "one").mkdir(parents=True)
    (project.root / "runs" / "one" / "run.json").write_text("{}")
    with pytest.raises(ModelError, match="the run in runs/one has saved no model yet"):
        make(model="runs/one")


def test_a_mistake_in_the_model_is_said_of_what_named_it(make, project: Project, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (project.root / "runs").mkdir()
    for model, overrides, key in ("runs/gone", [], "--model"), (None, ["model.path=runs/gone"], r"model\.path"):
        with pytest.raises(ModelError, match=rf"^{key}: runs/gone does not exist") as caught:
            make(*overrides, model=model)
        assert "hf download" not in str(caught.value)  # a directory that is here is no owner on the hub
    with pytest.raises(ModelError, match=r"^--model: runs is not a Hugging Face model directory"):
        make(model="runs")
    project.make_model("judge", architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(ModelError, match=r"^--model must be .*, but judge is a Qwen3ForSequenceClassification"):
        make(model="judge")
    with pytest.raises(ModelError, match=r"^--model: .*`hf download acme/small`"):
        make(model="acme/small")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.validation=null"], "no held-out prompts to evaluate on"),
        (["data.validation=gone.jsonl"], "gone.jsonl"),
        (["evaluation.by=kind"], "has no column 'kind' to group metrics by"),
        (["evaluation.samples_per_prompt=4"], "the samples of a prompt would all be the same"),
        (["reward.function=scoring:not_a_function"], "not_a_function"),
        (["environment.name=nobody"], "environment.name"),
        (["environment.processes=2", "cluster.launcher=inline"], "an inline run has one process for everything"),
        (["rollout.replicas=2", "cluster.launcher=inline"], "rollout.replicas"),
        (["model.path=gone"], "gone does not exist"),
        (["rollout.sampling.max_tokens=500"], "rollout.sampling.max_tokens is 500"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(make, overrides: list[str], said: str):
    with pytest.raises(UserError, match=said):
        make(*overrides)


async def test_an_environment_that_rewards_tokens_is_evaluated_though_no_advantage_reads_them(make):
    planned = make("environment.name=game_environments:Counting", "environment.arguments={step: 0.5}")
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [4], decode=str)

    async def generate(request):
        return SimpleNamespace(completions=[Completion([5], [-0.5], "stop", 1, 1)] * request.sampling.n)

    async def score(rows):
        return [Scored(1.0) for _ in rows]

    sampling = SamplingParams(n=2)
    policy = FleetPolicy(SimpleNamespace(generate=generate), tokenizer, sampling, "task", 1)
    rewards = SimpleNamespace(scorer=lambda count: score)
    made = make_runner(planned, Counting(0.5), lambda task: policy, rewards, TaskKind(sampling, 1), EpisodeActivity())
    episodes = await made.play(Task(0, [1, 2], "1+1=", None, {}))
    assert [list(one.token_rewards) for one in episodes] == [[0.0, 0.0, 0.5, 0.0, 0.0]] * 2
