"""Planning: everything that cannot work is refused before anything starts, and what will happen is said."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import projects
import pytest
from projects import NO_WEIGHTS, Project

from enginehouse.engines.options import EngineOptions
from enginehouse.errors import ConfigError, DataError, ModelError, UserError
from enginehouse.plugin import PluginLookupError, PluginManager, load_plugins
from enginehouse.plugin.findings import Findings
from enginehouse.plugin.secrets import insert_variables
from enginehouse.runtimes import RuntimeProblem
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.paths import EarlierRun
from enginehouse_rl.plan.functions import extend_path
from enginehouse_rl.plan.parts.engines import check_native_names, read_native_names
from enginehouse_rl.plan.plan import Plan, SFTPlan, plan

refusal = partial(projects.refusal, kind=ConfigError)


def test_a_plan_fills_in_what_depends_on_something_else(make: Callable[..., Plan], project: Project):
    planned = make("algorithm.epochs=2", "algorithm.minibatches=3")
    assert planned.roles["actor"].options["total_steps"] == 10 * 2 * 3
    assert planned.roles["rollout"].transport == "inproc"
    assert [(one.name, one.function) for one in planned.rewards] == [("", "scoring:right")]
    assert planned.advantage.reference == "enginehouse_rl.advantages.grpo:grpo"
    assert planned.run_directory == project.root / "runs/one"
    assert planned.python_path == (str(project.root),)
    assert planned.distributions == ("enginehouse-torch",)
    assert "reference" not in [stage.name for stage in planned.stages]
    assert not (project.root / "runs").exists()


def test_a_plan_says_what_will_happen(make: Callable[..., Plan]):
    said = make("algorithm.minibatches=4", "algorithm.kl.coefficient=0.1").render()
    for part in (
        "model: Qwen3ForCausalLM in float32",
        "torch, 1 rank",
        "torch, 1 replica, in the actor's processes",
        "by inproc (actor and rollout are in the same process); their effect checked every 50 updates",
        "8 prompts x 4 samples = 32 samples",
        "10 steps x 1 epoch x 4 minibatches = 40 optimizer steps",
        "0.1 times the k3 divergence in the loss",
        "40 prompts in train.jsonl",
    ):
        assert part in said


def test_separate_processes_get_another_transport(make: Callable[..., Plan]):
    planned = make("rollout.placement=separate", "actor.processes=2")
    assert planned.roles["rollout"].transport == "shared_memory"


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss.arguments.importance_cap=2.0", "algorithm.old_logprobs=actor"],
        ["algorithm.loss.arguments.importance_cap=null"],
    ],
)
def test_an_importance_cap_goes_with_logprobs_of_the_actor(make: Callable[..., Plan], overrides: list[str]):
    assert make(*overrides).config.algorithm.loss.arguments


def test_roles_share_processes_where_they_can(make: Callable[..., Plan]):
    assert make().roles["rollout"].shares == "actor"
    assert make("actor.processes=2", "rollout.replicas=2").roles["rollout"].shares == "actor"
    for override, why in {
        "actor.processes=2": "rollout.replicas is 1, actor.processes 2",
        "rollout.placement=separate": "set by rollout.placement",
        f"rollout.engine.runtime={sys.executable}": "it runs in another Python environment than the actor",
    }.items():
        planned = make(override)
        assert planned.roles["rollout"].shares is None
        assert f"in separate processes ({why})" in dict(planned.facts)["rollout"]


def test_a_plan_says_which_interpreter_each_role_gets_and_why(make: Callable[..., Plan], monkeypatch):
    planned = make()
    assert {name: role.interpreter.python for name, role in planned.roles.items()} == {"actor": None, "rollout": None}
    assert "runtimes" not in dict(planned.facts), "it is said only of another environment than this one"


def test_an_interpreter_by_path_has_its_worker_in_a_process_of_its_own(make: Callable[..., Plan]):
    planned = make(f"rollout.engine.runtime={sys.executable}")
    assert planned.roles["rollout"].interpreter.python == sys.executable
    assert planned.roles["actor"].interpreter.python is None
    assert planned.roles["rollout"].shares is None
    assert f"rollout in {sys.executable} (chosen by engine.runtime)" in dict(planned.facts)["runtimes"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.placement=colocated"], "the actor's runtime is 'current' and the rollout's"),
        (["cluster.launcher=inline"], "rollout.engine.runtime: an inline run has one process and one interpreter"),
    ],
)
def test_one_process_with_two_interpreters_is_refused(make: Callable[..., Plan], overrides: list[str], said: str):
    assert said in refusal(make, f"rollout.engine.runtime={sys.executable}", *overrides)


def test_a_runtime_that_is_not_there_is_said_with_the_key_that_names_it(make: Callable[..., Plan]):
    said = refusal(make, "actor.engine.runtime=nowhere", kind=RuntimeProblem)
    assert said.startswith("actor.engine.runtime: no runtime 'nowhere' in")
    said = refusal(make, "rollout.engine.runtime=/no/such/python", kind=RuntimeProblem)
    assert said == "rollout.engine.runtime: there is no Python interpreter at /no/such/python"


def test_a_loss_with_a_kl_term_uses_the_reference_with_the_actors_options(make: Callable[..., Plan]):
    planned = make("algorithm.kl.coefficient=0.1", "actor.engine.options.lr=0.5")
    assert "reference" in [stage.name for stage in planned.stages]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.minibatches=33"],
            "a step has 32 samples (8 prompts, train.prompts_per_step, times 4, rollout.samples_",
        ),
        (["actor.processes=33", "rollout.placement=separate"], "fewer than the 33 processes of the actor"),
        (
            ["rollout.samples_per_prompt=1"],
            "must be at least 2, not 1: the advantage 'grpo' compares the samples of one prompt with each other",
        ),
        (["rollout.samples_per_prompt=1", "algorithm.advantage.name=rloo"], "'rloo' compares the samples"),
        (["rollout.sampling.temperature=0"], "is zero everywhere and nothing is learned"),
        (["train.prompts_per_step=41"], "train.prompts_per_step is 41, but train.jsonl holds only 40 prompts"),
        (["actor.processes=2", "rollout.placement=colocated"], "rollout.replicas (1) must equal actor.processes (2)"),
        (["cluster.launcher=inline", "actor.processes=2", "rollout.replicas=2"], "must be 1, not 2"),
        (
            ["rollout.sampling.max_tokens=128"],
            "at most 128 tokens together: the model's positions (max_position_embeddings)",
        ),
        (
            ["rollout.engine.options.max_model_tokens=8"],
            "at most 8 tokens together: rollout.engine.options.max_model_tokens",
        ),
        (["algorithm.loss.arguments.importance_cap=2.0"], "set algorithm.old_logprobs=actor"),
    ],
)
def test_arithmetic_that_cannot_work_is_said_in_words(make: Callable[..., Plan], overrides: list[str], said: str):
    assert said in refusal(make, *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.minibatches=20", "actor.processes=2", "rollout.replicas=2"], "about 1.6 a minibatch"),
        (["actor.engine.options.warmup_steps=10"], "the warm-up lasts for the whole run: it takes 10"),
        (["actor.engine.options.total_steps=4"], "total_steps is 4, but the run takes 10 optimizer steps"),
        (["train.checkpoint_minutes=0"], "but not if its process is killed"),
        (["reference.path=model"], "algorithm.kl.coefficient is 0: no reference model runs"),
    ],
)
def test_what_may_surprise_is_noted_and_runs(make: Callable[..., Plan], overrides: list[str], said: str):
    assert any(said in note for note in make(*overrides).notes)


@pytest.mark.parametrize("key", ["actor", "rollout"])
def test_an_unknown_backend_is_refused_with_the_choices(make: Callable[..., Plan], key: str):
    said = refusal(make, f"{key}.engine.backend=torhc", kind=PluginLookupError)
    assert said.startswith(f"{key}.engine.backend: ")
    assert "'torch'" in said


def test_an_unknown_option_of_a_backend_is_refused_with_the_nearest(make: Callable[..., Plan]):
    said = refusal(make, "actor.engine.options.learning_rat=1", "actor.engine.options.lr=fast")
    assert "unknown key 'actor.engine.options.learning_rat'" in said
    assert "actor.engine.options.lr: expected a number, got the string 'fast' (options of engine 'torch')" in said


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["data.train=trian.jsonl"], DataError, "the nearest in"),
        (["data.validation=nothing.jsonl"], DataError, "no data file nothing.jsonl"),
        (["data.prompt=promt"], DataError, "no column 'promt'. Did you mean 'prompt'?"),
    ],
)
def test_data_that_is_not_there_is_refused(make: Callable[..., Plan], overrides: list[str], kind: Any, said: str):
    assert said in refusal(make, *overrides, kind=kind)


def test_a_model_path_that_is_no_model_is_refused(
    make: Callable[..., Plan], project: Project, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "Did you mean model?" in refusal(make, "model.path=modle", kind=ModelError)
    hub = refusal(make, "model.path=Acme/Tiny-0.6B", kind=ModelError)
    assert "HF_HUB_OFFLINE is set; no revision is cached" in hub
    assert "`hf download Acme/Tiny-0.6B`" in hub
    assert "is a file" in refusal(make, "model.path=train.jsonl", kind=ModelError)
    (project.root / "empty").mkdir()
    missing = refusal(make, "model.path=empty", kind=ModelError)
    for part in ("config.json", "weights (model.safetensors)", "a tokenizer (tokenizer.json)"):
        assert part in missing


def test_validations_without_a_file_are_noted(make: Callable[..., Plan], make_sft: Callable[..., SFTPlan]):
    for planned in (make("train.validate_every=5"), make_sft("train.validate_every=5")):
        assert any("there is no file to validate on (data.validation)" in note for note in planned.notes)


def test_an_adapter_as_a_model_is_told_of_its_base(make: Callable[..., Plan], project: Project):
    (project.root / "adapter").mkdir()
    (project.root / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "models/base"}')
    said = refusal(make, "model.path=adapter", kind=ModelError)
    assert "must be a full model, but adapter is an adapter of models/base" in said


def test_a_run_directory_as_a_model_is_told_where_its_model_is(make: Callable[..., Plan], project: Project):
    (project.root / "run").mkdir()
    (project.root / "run" / "run.json").write_text("{}")
    project.make_model("run/model")
    assert "run is a run directory; its newest model is run/model" in refusal(make, "model.path=run", kind=ModelError)


def test_a_reward_model_is_no_policy(make: Callable[..., Plan], project: Project):
    project.make_model("judge", architectures=["Qwen3ForSequenceClassification"])
    said = refusal(make, "model.path=judge", kind=ModelError)
    assert "model.path must be a causal language model, but judge is a Qwen3ForSequenceClassification" in said
    held_near = ("reference.path=judge", "algorithm.kl.coefficient=0.1")
    assert "reference.path must be a causal language model, but judge" in refusal(make, *held_near, kind=ModelError)


def test_a_model_that_lacks_a_shard_is_refused(make: Callable[..., Plan], project: Project):
    model = project.root / "model"
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    said = refusal(make, kind=ModelError)
    assert "model-2.safetensors" in said
    assert "weights model-1.safetensors" not in said


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (NO_WEIGHTS[:-1], "): download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "`git lfs pull` downloads"),
    ],
    ids=["cut short", "a pointer"],
)
def test_a_damaged_file_of_weights_is_refused(make: Callable[..., Plan], project: Project, content: bytes, cure: str):
    (project.root / "model" / "model.safetensors").write_bytes(content)
    said = refusal(make, kind=ModelError)
    assert "model.path: " in said
    assert "model.safetensors is not a complete safetensors file (" in said
    assert cure in said


def test_a_reference_with_another_vocabulary_is_refused(make: Callable[..., Plan], project: Project):
    project.make_model("other", vocab_size=99)
    said = refusal(make, "reference.path=other", "algorithm.kl.coefficient=0.1", kind=ModelError)
    assert "99 tokens" in said


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("scorign:right", "there is no module 'scorign'. Did you mean 'scoring'"),
        ("scoring:rigth", "has no 'rigth'. Did you mean 'right'?"),
        ("scoring:not_a_function", "must be a function or a class, not int"),
        ("scoring.py:right", "must name a module, not a file: scoring:right"),
        ("exact_mach", "Did you mean 'exact_match'?"),
        ("scoring:", "neither a registered name nor of the form module:function"),
        ("scoring.right", "name your own function as scoring:right"),
        ("needs_more:f", "importing 'needs_more' raised ModuleNotFoundError: No module named 'nowhere'"),
        ("explodes:f", "importing 'explodes' raised ZeroDivisionError: division by zero"),
        ("exits:f", "importing 'exits' raised SystemExit: 3"),
        ("garbled:f", "importing 'garbled' raised SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_imported_says_which_part_fails(make, project, reference, said):
    for name, source in {
        "needs_more": "import nowhere\n",
        "explodes": "def f(): pass\n1 / 0\n",
        "exits": "import sys\nsys.exit(3)\n",
        "garbled": "def f(:\n",
    }.items():
        (project.root / f"{name}.py").write_text(source)
    kind = ConfigError if ":" in reference else PluginLookupError
    message = refusal(make, f"reward.function={reference!r}", kind=kind)
    assert said in message
    if reference == "explodes:f":
        assert "explodes.py, line 2: 1 / 0" in message


def test_a_reward_beside_the_config_file_can_be_imported(project: Project, plugins: PluginManager):
    (project.root / "deep").mkdir()
    (project.root / "deep" / "deep_scoring.py").write_text("def f(**columns): return 1.0\n")
    project.config["reward"] = {"function": "deep_scoring:f"}
    path = project.save("deep/run.yaml")
    planned = plan(load_config(path), plugins, path)
    assert planned.python_path == (str(project.root), str(project.root / "deep"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.arguments={scale: 2}", "reward.function=scoring:bare"],
            "and reward.arguments (docs/rewards.md)). Arguments:\n  prompt: required\n  response: required",
        ),
        (
            ["reward.arguments={answer: 2}"],
            "the reward already gets an argument 'answer' from the column 'answer' of train.jsonl",
        ),
        (
            ["data.train=unanswered.jsonl"],
            "requires the argument 'answer', not among prompt, messages, response, response_tokens, finish_reason, the "
            "columns of unanswered.jsonl and reward.arguments",
        ),
        (["algorithm.loss.arguments={clip_lo: 0.1}"], "does not take 'clip_lo'"),
        (["algorithm.loss.arguments.clip_lo=1"], "Did you mean 'clip_low'?"),
        (["algorithm.loss.arguments.clip_lo=1"], "\n  clip_low: number, > 0, <= 1; default 0.2\n"),
        (["algorithm.loss.arguments.clip_lo=1"], "\n  dual_clip: number or null, > 1; default unset\n"),
        (["algorithm.loss.arguments.clip_ratio=1"], "In verl clip_ratio, clip_ratio_low, clip_ratio_high, "),
        (["algorithm.loss.arguments.clip_ratio_low=1"], "algorithm.loss.arguments.clip_low and "),
        (["algorithm.loss.arguments.optim.lr=1"], "in enginehouse actor.engine.options.lr, "),
        (["algorithm.loss.arguments.epsilon=1"], "In TRL epsilon, epsilon_high, delta; in enginehouse "),
        (
            ["algorithm.advantage.arguments.norm_adv_by_std_in_grpo=1"],
            "in enginehouse algorithm.advantage.arguments.scale",
        ),
        (["algorithm.advantage.arguments={scal: true}"], "Did you mean 'scale'?"),
        (["algorithm.advantage.name=scoring:missing"], "algorithm.advantage.name: module 'scoring'"),
        (["algorithm.loss.name=supervised", "algorithm.kl.coefficient=1"], "'kl_coefficient', 'kl_estimator'"),
    ],
)
def test_arguments_that_a_function_cannot_take_are_refused(make, project, overrides, said):
    project.write_rows("unanswered.jsonl", [{"prompt": f"{n}+1="} for n in range(40)])
    assert said in refusal(make, *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["format", "{pattern: '('}"], "the pattern '(' is no regular expression: missing ), "),
        (["format", "{}"], "format requires the argument 'pattern'"),
        (["length", "{}"], "the reward 'length' needs either target, or max_tokens and buffer_tokens"),
        (["length", "{max_tokens: 5}"], "the reward 'length' needs either target, or max_tokens and buffer_tokens"),
        (["length", "{max_tokens: 5, buffer_tokens: 6}"], "buffer_tokens must be at most max_tokens, 5, not 6"),
        (["length", "{target: 0}"], "reward.arguments.target: expected more than 0, got the number 0"),
        (["math", "{}"], "the reward 'math' needs math-verify: pip install 'enginehouse[math]'"),
        (["code", "{}"], "the reward 'code' needs inputs_column and outputs_column, or asserts_column, or all three"),
        (["code", "{asserts_column: anser}"], "needs the column 'anser' with tests. Did you mean 'answer'?"),
        (["code", "{asserts_column: answer, isolation: none}"], "reward.arguments.isolation"),
    ],
)
def test_a_built_in_reward_that_could_not_score_is_refused(make, monkeypatch, overrides, said):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    name, arguments = overrides
    message = refusal(make, f"reward.function={name}", f"reward.arguments={arguments}")
    assert said in message
    assert "reward." in message


def test_a_reward_gets_what_it_takes(make: Callable[..., Plan]):
    (reward,) = make("reward.function=scoring:bare").rewards  # neither finish_reason nor the answer
    assert reward.function == "scoring:bare"


SEVERAL = (
    "reward.function=null",
    "reward.functions={right: {function: 'scoring:right'}, form: {function: format, arguments: {pattern: x}}}",
)


def test_several_rewards_are_planned_in_the_order_of_the_config(make: Callable[..., Plan]):
    planned = make(*SEVERAL, "reward.functions.form.weight=0.2", "reward.functions.form.clip=[-1, 1]")
    right, form = planned.rewards
    assert (right.name, right.function, right.section.weight) == ("right", "scoring:right", 1.0)
    assert (form.name, form.arguments, form.section.weight) == ("form", {"pattern": "x"}, 0.2)
    assert [form.clip(score) for score in (-3.0, 0.5, 3.0)] == [-1.0, 0.5, 1.0]
    assert "1 x scoring:right (right) + 0.2 x format (form), in 1 process each" in planned.render()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward.functions.form.function=formt"], ["reward.functions.form.function: ", "Did you mean 'format'?"]),
        (
            ["reward.functions.form.arguments={}"],
            ["reward.functions.form.function: format requires the argument 'pattern'"],
        ),
        (["reward.functions.form.arguments.pattern='('"], ["reward.functions.form.function: the pattern '('"]),
        (["reward.functions.form.arguments.match=most"], ["reward.functions.form.arguments.match: expected one of"]),
        (
            ["reward.functions.mean={function: format, arguments: {pattern: x}}"],
            ["reward.functions.mean: 'mean' is already the name of a metric"],
        ),
        (["reward.functions.form.arguments.api_key=x"], ["reward.functions.form.arguments.api_key holds a secret"]),
        (
            ["reward.functions.form.arguments={}", "reward.functions.right.function='scoring:rigth'"],
            ["2 problems", "reward.functions.form.function: ", "reward.functions.right.function: module 'scoring'"],
        ),
    ],
)
def test_each_of_several_rewards_is_checked(make: Callable[..., Plan], overrides: list[str], said: list[str]):
    message = projects.refusal(make, *SEVERAL, *overrides)
    assert [part for part in said if part not in message] == []


def test_k1_in_the_loss_is_refused_with_the_reason_and_k1_in_the_reward_is_not(make: Callable[..., Plan]):
    k1 = ("algorithm.kl.coefficient=0.1", "algorithm.kl.estimator=k1")
    said = refusal(make, *k1)
    assert "k1 in the loss regularises nothing, since its gradient is zero in expectation" in said
    assert all(cure in said for cure in ("k2", "k3", "algorithm.kl.place=reward"))
    assert "reference" in [stage.name for stage in make(*k1, "algorithm.kl.place=reward").stages]
    assert make("algorithm.kl.estimator=k1")  # no term, nothing to refuse


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_other_estimators_than_k1_in_the_reward_are_refused_with_the_reason(make: Callable[..., Plan], estimator: str):
    term = ("algorithm.kl.coefficient=0.1", "algorithm.kl.place=reward")
    said = refusal(make, *term, f"algorithm.kl.estimator={estimator}")
    assert f"{estimator} in the reward does not hold the policy near its reference" in said
    assert all(cure in said for cure in ("algorithm.kl.estimator=k1", "algorithm.kl.place=loss"))
    assert make("algorithm.kl.place=reward", f"algorithm.kl.estimator={estimator}")  # no term, nothing to refuse


@pytest.mark.parametrize(("place", "estimator"), [("reward", "k1"), ("loss", "k3")])
def test_the_estimator_goes_by_the_place_of_the_term(make: Callable[..., Plan], place: str, estimator: str):
    said = make("algorithm.kl.coefficient=0.1", f"algorithm.kl.place={place}").render()
    assert f"0.1 times the {estimator} divergence in the {place}" in said


@pytest.mark.parametrize(
    ("overrides", "whose"),
    [
        ([], "rollout's"),
        (["algorithm.loss.name=policy_gradient", "model.dtype=bfloat16"], "rollout's"),
        (["algorithm.loss.name=cispo", "model.dtype=bfloat16"], "rollout's"),
        (["algorithm.loss.name=sapo", "model.dtype=bfloat16"], "rollout's"),
        (["algorithm.loss.arguments.clip_low=0.01"], "rollout's"),
        (["algorithm.loss.name=gspo"], "actor's (its ratio is clipped closer to 1"),
        (["algorithm.loss={name: gspo, arguments: {clip_low: 0.2, clip_high: 0.2}}"], "actor's (its ratio"),
        (["algorithm.loss.arguments.clip_low=0.01", "model.dtype=bfloat16"], "actor's (its ratio is clipped"),
        (["train.staleness=1"], "actor's (samples come from older weights)"),
        (["algorithm.old_logprobs=actor"], "actor's"),
    ],
)
def test_the_actor_computes_old_logprobs_for_a_loss_that_needs_them(make, overrides, whose):
    planned = make("algorithm.loss.arguments={}", *overrides)
    assert f"loss; old logprobs are the {whose}" in planned.render()
    assert planned.old_logprobs == whose.partition("'")[0]


def test_a_kl_term_in_the_loss_without_weights_for_older_samples_is_noted(make: Callable[..., Plan]):
    stale = ("train.staleness=1", "algorithm.kl.coefficient=0.1", "algorithm.loss.name=clipped_policy")
    without = (*stale, "algorithm.loss.arguments={importance_cap: null}")
    assert any("the term in the loss treats samples of older weights" in note for note in make(*without).notes)
    for right in (stale, (*without[1:], "algorithm.loss.arguments={}"), (*without, "algorithm.kl.place=reward")):
        assert not any("older weights" in note for note in make(*right).notes)


def test_a_loss_that_needs_the_actors_logprobs_is_refused_with_the_rollouts(make: Callable[..., Plan]):
    said = refusal(make, "algorithm.loss.name=gspo", "algorithm.old_logprobs=rollout")
    assert "algorithm.loss.name: 'gspo' needs the actor's own logprobs" in said
    assert "set algorithm.old_logprobs=actor" in said
    narrow = ("algorithm.loss.arguments.clip_high=0.001", "model.dtype=bfloat16", "algorithm.old_logprobs=rollout")
    assert any("clip_high is less than 0.05, but in bfloat16" in note for note in make(*narrow).notes)
    assert not any("clip_high" in note for note in make(*narrow[::2]).notes), "float32 rounds too little for that"


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
@pytest.mark.parametrize("column", ["prompt", "messages", "response", "response_tokens", "finish_reason"])
def test_a_column_that_a_reward_would_never_see_is_refused(make, project, key, column):
    row = {"question": "1+1=", "answer": "2"}
    for name in ("train.jsonl", "validation.jsonl"):
        project.write_rows(name, [row] * 40)
    kept = ["data.prompt=question", "data.validation=validation.jsonl"]
    make(*kept)
    project.write_rows("clash.jsonl", [{**row, column: "x"}] * 40)
    said = refusal(make, *kept, f"{key}=clash.jsonl")
    assert f"clash.jsonl: a reward gets '{column}' from the run" in said
    assert "rename the column in the data" in said


def test_a_column_that_the_reward_does_not_take_may_have_any_name(make: Callable[..., Plan], project: Project):
    (project.root / "plain_scoring.py").write_text("def plain(response, answer): return 0.0")
    row = {"prompt": "1+1=", "answer": "2", "messages": [], "finish_reason": "x"}
    project.write_rows("chats.jsonl", [row] * 40)
    make("data.train=chats.jsonl", "reward.function=plain_scoring:plain")
    project.write_rows("chats.jsonl", [{**row, "response": "x"}] * 40)
    assert "a reward gets 'response'" in refusal(make, "data.train=chats.jsonl", "reward.function=plain_scoring:plain")


def test_the_prompt_column_may_have_any_name(make: Callable[..., Plan], project: Project):
    project.write_rows("odd.jsonl", [{"response": "1+1=", "answer": "2"}] * 40)
    make("data.train=odd.jsonl", "data.prompt=response")


@pytest.mark.parametrize("name", ["spiece.model", "qwen.tiktoken", "vocab.txt", "tokenizer.model", "vocab.json"])
def test_a_tokenizer_goes_by_several_names(make: Callable[..., Plan], project: Project, name: str):
    (project.root / "model/tokenizer.json").rename(project.root / "model" / name)
    make()
    (project.root / "model" / name).rename(project.root / "model/chat_template.jinja")
    assert "missing: a tokenizer (tokenizer.json)" in refusal(make, kind=ModelError)


def test_a_transport_that_does_not_reach_is_refused(make: Callable[..., Plan]):
    said = refusal(make, "weights.transport=inproc", "rollout.placement=separate")
    assert "in different processes of one host (rollout.placement), but 'inproc' cannot connect them" in said
    assert "unknown weight transport 'carrier_pigeon'" in refusal(
        make, "weights.transport=carrier_pigeon", kind=PluginLookupError
    )


def test_roles_that_may_sit_on_several_hosts_get_a_transport_that_reaches(make: Callable[..., Plan]):
    joined = make("cluster.address=x", "rollout.placement=separate")
    assert joined.roles["rollout"].transport == "collective"
    assert any("share a host is known only when the run starts" in note for note in joined.notes)
    sharded = make("cluster.address=x", "rollout.placement=separate", "actor.processes=2")
    assert sharded.roles["rollout"].transport == "point_to_point"
    assert "any hosts of a cluster, and 2 processes train" in str(sharded)
    named = make("cluster.address=x", "rollout.placement=separate", "weights.transport=shared_memory")
    assert named.roles["rollout"].transport == "shared_memory"
    assert (
        make("rollout.placement=separate", "weights.transport=point_to_point").roles["rollout"].transport
        == "point_to_point"
    )
    assert make("cluster.address=x", "rollout.placement=colocated").roles["rollout"].transport == "inproc"
    two = ("actor.processes=2", "rollout.replicas=2")
    colocated = make("cluster.address=x", "rollout.placement=colocated", *two)
    assert colocated.roles["rollout"].transport == "inproc"
    assert "processes train" not in str(colocated)


LIMITED = """
from enginehouse.engines.options import RolloutOptions
from enginehouse.plugin import *

enginehouse_protocol = "1.0"

class Options(RolloutOptions):
    def surprises(self):
        return ["it is slow on Mondays"] if self.max_running == 1 else []

@hookimpl
def enginehouse_register_backends(register):
    register(RolloutBackend(name="limited", engine="enginehouse_torch.rollout:TorchRolloutEngine",
                            options="limited_plugin:Options", devices=("cpu",)))
    register(RolloutBackend(name="far", engine="no_such_engine:Engine", options="limited_plugin:Options",
                            requires=("no-such-engine",),
                            runtimes={"cpu": RequirementSet(requirements=("no-such-engine",))}))
    register(RolloutBackend(name="lost", engine="no_such_engine:Engine", options="limited_plugin:Options"))
    register(TrainBackend(name="unable", engine="limited_plugin:Unable", capabilities={"lora"},
                          options="enginehouse.engines.options:TrainOptions"))

class Unable:
    pass

def capped(view, *, max_tokens: int): ...

@hookimpl
def enginehouse_register_losses(register):
    register(Loss(name="capped", function="limited_plugin:capped",
                  taken_from={"max_tokens": "rollout.sampling.max_tokens"}))
"""


@pytest.fixture
def limited(project: Project) -> Callable[..., Plan]:
    """Plans with the `torch` backends and a rollout backend without any capability."""
    from importlib.metadata import EntryPoint

    (project.root / "limited_plugin.py").write_text(LIMITED)
    sys.path.insert(0, str(project.root))
    declared = {"torch": "enginehouse_torch.plugin", "limited": "limited_plugin"}
    points = [EntryPoint(name, module, "enginehouse") for name, module in declared.items()]
    return partial(project.planned, plugins=load_plugins(entry_points=points))


def test_what_a_backend_cannot_do_is_switched_off_with_a_note_or_refused(limited: Callable[..., Plan]):
    backend = "rollout.engine.backend=limited"
    planned = limited(backend)
    assert planned.roles["rollout"].effect_check_every == 0
    assert any("the effect of a weight update is not checked" in note for note in planned.notes)
    assert not any("Mondays" in note or "pause_keep" in note for note in planned.notes)
    stale = limited(backend, "train.staleness=1", "rollout.placement=separate", "cluster.launcher=ray")
    assert any("each weight update waits until the running requests have ended" in note for note in stale.notes)
    keeps = "rollout.cache_at_update=keep"
    with pytest.raises(ConfigError, match="engine 'limited' cannot keep keys and values over a weight update"):
        limited(backend, keeps, "train.staleness=1", "rollout.placement=separate", "cluster.launcher=ray")
    with pytest.raises(ConfigError, match="cache_at_update=keep has no effect"):
        limited(keeps)
    slow = limited(backend, "rollout.engine.options.max_running=1")
    assert "rollout.engine.options: it is slow on Mondays" in slow.notes
    said = refusal(limited, backend, "rollout.sampling.stop=[x]")
    assert said.startswith("rollout.sampling.stop: engine 'limited' cannot stop")
    said = refusal(limited, backend, "data.validation=train.jsonl", "evaluation.sampling.stop=[x]")
    assert said.startswith("evaluation.sampling.stop: engine 'limited' cannot stop")
    own = ["data.validation=train.jsonl", "evaluation.engine.backend=limited", "rollout.sampling.stop=[x]"]
    assert refusal(limited, *own).startswith("evaluation.sampling.stop (unset: rollout.sampl")
    limited(*own, "evaluation.sampling.stop=[]")


def test_an_engine_is_looked_for_where_it_is_to_run(limited: Callable[..., Plan]):
    far = projects.refusal(limited, "rollout.engine.backend=far")
    assert "the engine of" not in far  # its runtime is not made yet
    lost = "rollout.engine.backend=lost"
    limited(lost, f"rollout.engine.runtime={sys.executable}")
    assert "the engine of 'lost': there is no module 'no_such_engine'" in projects.refusal(limited, lost)


def test_an_engine_that_cannot_do_what_its_record_declares_is_refused(limited: Callable[..., Plan]):
    said = refusal(limited, "actor.engine.backend=unable")
    assert "does not implement TrainsAdapters: it lacks forward_base, export_adapter" in said


def test_a_loss_may_need_what_is_taken_from_elsewhere(limited: Callable[..., Plan]):
    assert limited("algorithm.loss.name=capped").loss.arguments == {"max_tokens": 8}


def test_a_backend_for_another_device_is_refused(limited: Callable[..., Plan]):
    elsewhere = ("cluster.device=cuda", "cluster.address=x")
    said = refusal(limited, "rollout.engine.backend=limited", *elsewhere)
    assert "'limited' runs on cpu, but this run is on cuda" in said


def test_an_earlier_run_is_only_deleted_when_asked(make: Callable[..., Plan], project: Project):
    earlier = project.root / "runs/one"
    earlier.mkdir(parents=True)
    make()
    (earlier / "run.json").write_text("{}")
    assert "already contains a run" in refusal(make, kind=EarlierRun)
    make("run.overwrite=true")
    assert (earlier / "run.json").exists()


def test_a_directory_that_is_no_run_is_never_deleted(make: Callable[..., Plan], project: Project):
    said = refusal(make, "run.directory=model", "run.overwrite=true")
    assert "was not made by a run" in said
    (project.root / "run.json").write_text("{}")
    said = refusal(make, "run.directory=.", "run.overwrite=true")
    assert "the current directory" in said
    assert "is a file" in refusal(make, "run.directory=train.jsonl")
    before = sorted(project.root.iterdir())
    assert "cannot create /proc/x" in refusal(make, "run.directory=/proc/x"), "who may write is not who can, as root"
    make("run.directory=new/run")
    assert sorted(project.root.iterdir()) == before


def test_a_run_does_not_delete_the_model_it_reads(make: Callable[..., Plan], project: Project):
    earlier = project.root / "runs/one"
    earlier.mkdir(parents=True)
    (earlier / "run.json").write_text("{}")
    project.make_model("runs/one/model")
    said = refusal(make, "run.overwrite=true", "model.path=runs/one/model")
    assert "model.path (runs/one/model) is inside " in said


def test_a_copied_link_that_leads_nowhere_is_called_one(make: Callable[..., Plan], project: Project):
    (project.root / "copy").symlink_to("models/step-000250")
    said = refusal(make, "model.path=copy", kind=ModelError)
    assert "copy is a broken link: models/step-000250 does not exist" in said
    assert "cp -rL" in said


def test_several_problems_are_listed_together(make: Callable[..., Plan]):
    said = refusal(make, "data.train=nothing.jsonl", "model.path=nowhere", "rollout.samples_per_prompt=1")
    assert said.startswith("3 problems in the config ")


def test_a_supervised_plan(make_sft: Callable[..., SFTPlan]):
    planned = make_sft()
    assert planned.roles["actor"].options["total_steps"] == 5
    assert "40 demonstrations in demonstrations.jsonl" in planned.render()


@pytest.mark.parametrize(
    ("overrides", "kind", "said"),
    [
        (["actor.processes=9"], ConfigError, "a step has 8 rows (train.rows_per_step), fewer than the 9 processes"),
        (["data.response=reply"], DataError, "no column 'reply'"),
        (["data.chat_template=true"], ConfigError, "has no chat template"),
        (["model.path=nowhere"], ModelError, "nowhere does not exist"),
        (["actor.engine.backend=megatorch"], PluginLookupError, "actor.engine.backend"),
    ],
)
def test_a_supervised_run_that_cannot_work_is_refused(make_sft, overrides, kind, said):
    assert said in refusal(make_sft, *overrides, kind=kind)


# Evaluation


def test_validations_are_answered_by_the_rollout_unless_an_engine_is_named(make: Callable[..., Plan], project: Project):
    validation = f"data.validation={project.root / 'train.jsonl'}"
    assert "evaluation" not in make(validation).roles
    planned = make(validation, "evaluation.engine.backend=torch")
    assert (planned.roles["evaluation"].backend, planned.roles["evaluation"].transport) == ("torch", "shared_memory")
    assert planned.roles["evaluation"].effect_check_every
    assert set(planned.roles) == {"actor", "rollout", "evaluation"}
    assert dict(planned.facts)["evaluation"].startswith("torch, 1 replica, in a separate process")


def test_a_plan_says_what_becomes_of_an_episode_that_fails(make: Callable[..., Plan]):
    assert "schedule" not in dict(make().facts)
    said = dict(make("rollout.on_failure=drop", "rollout.episode_seconds=30").facts)["schedule"]
    assert said == "an episode that raises or takes more than 30 s is left out"
    said = dict(make("rollout.episode_seconds=1.5").facts)["schedule"]
    assert said == "an episode that raises or takes more than 1.5 s ends the run"


def test_a_plan_says_what_is_validated_how_and_how_often(make: Callable[..., Plan], project: Project):
    project.write_rows("more.jsonl", [{"prompt": "1+1=", "answer": "2", "kind": "easy"}] * 3)
    said = dict(make("data.validation=train.jsonl", "train.validate_every=5").facts)["validation"]
    assert said == (
        "prompts: 40 of train.jsonl, answered greedily: 40 answers before the first step, every 5 steps and after "
        "the last"
    )
    several = ("data.validation={aime: train.jsonl, gsm: more.jsonl}", "evaluation.max_prompts=10")
    drawn = ("evaluation.samples_per_prompt=4", "evaluation.sampling.temperature=0.6")
    said = dict(make(*several, *drawn).facts)["validation"]
    assert said == (
        "prompts: 10 of train.jsonl, 3 of more.jsonl, answered 4 samples each at temperature 0.6: 52 answers before "
        "the first step and after the last"
    )
    assert make("data.validation.gsm=more.jsonl", "evaluation.by=kind")
    twice = dict(make("data.validation={aime: more.jsonl, gsm: more.jsonl}").facts)["validation"]
    assert "3 of more.jsonl, 3 of more.jsonl, answered greedily: 6 answers" in twice


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.by=answr"], "evaluation.by: train.jsonl has no column 'answr' to group metrics by. Did you"),
        (["evaluation.samples_per_prompt=4"], "the samples of a prompt would all be the same; set the temperature"),
        (
            ["evaluation.sampling.max_tokens=128"],
            "evaluation.sampling.max_tokens is 128, but a prompt and its response",
        ),
        (
            ["data.validation={a/b: x.jsonl}"],
            "data.validation (in the override 'data.validation={a/b: x.jsonl}'): expected names of ",
        ),
        (["data.validation=[x.jsonl]"], "expected the path of a file, or several paths by name, as in {aime: a.jsonl}"),
        (["data.validation={a: none.jsonl, b: train.jsonl}"], "no data file none.jsonl"),
    ],
)
def test_a_validation_that_cannot_be_is_refused(make: Callable[..., Plan], overrides: list[str], said: str):
    assert said in projects.refusal(make, "data.validation=train.jsonl", *overrides)


def test_an_engine_for_validations_gets_weights_by_another_transport_where_the_rollouts_does_not_reach(make, project):
    asked = (f"data.validation={project.root / 'train.jsonl'}", "evaluation.engine.backend=torch")
    planned = make(*asked, "weights.transport=inproc")
    assert (planned.roles["rollout"].transport, planned.roles["evaluation"].transport) == ("inproc", "shared_memory")
    planned = make(*asked, "rollout.placement=separate", "weights.transport=collective")
    assert (planned.roles["rollout"].transport, planned.roles["evaluation"].transport) == ("collective", "collective")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "evaluation.engine is set, but there is no file to validate on (data.validation)"),
        (("cluster.launcher=inline",), "evaluation.engine needs its own process, but an inline run has one"),
        (("evaluation.engine.options={no_such: 1}",), "evaluation.engine.options.no_such"),
    ],
)
def test_an_engine_for_validations_that_cannot_be_is_refused(make: Callable[..., Plan], overrides: Any, said: str):
    assert said in refusal(make, "evaluation.engine.backend=torch", *overrides)


def test_a_backend_for_validations_that_is_not_there_is_named_by_its_key(make: Callable[..., Plan], project: Project):
    with pytest.raises(PluginLookupError, match=r"evaluation\.engine\.backend: "):
        make("evaluation.engine.backend=no_such", f"data.validation={project.root / 'train.jsonl'}")


DECLARED = """
from typing import Annotated, Literal

from pydantic import Field

class Odd:
    def __eq__(self, other):
        raise ValueError("the truth of an array is ambiguous")
    __hash__ = None

def choosing(view, *, share: Annotated[float, Field(ge=0, lt=1)], kind: "Literal['soft', 'hard']" = "soft",
             sizes: tuple[int, ...] = (), limit: "Unheard" = None, flag: bool = False, either: int | str = 0,
             array=Odd()):
    raise NotImplementedError

def scaled(prompt, response, finish_reason, answer, *, partial: Annotated[float, Field(gt=0)] = 1.0):
    raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "{share: 1}",
            "algorithm.loss.arguments.share: expected less than 1, got the number 1 (an argument of 'declared",
        ),
        ("{share: '0.5'}", "share: expected a number, got the string '0.5'"),
        (
            "{share: 0.5, kind: sof}",
            "kind: expected one of 'soft' or 'hard', got the string 'sof'. Did you mean 'soft'?",
        ),
        ("{share: 0.5, sizes: [1, 2.5]}", "sizes: expected a whole number, got the number 2.5"),
        ("{share: 0.5, flag: 1}", "flag: expected true or false, got the number 1"),
        ("{share: 0.5, either: [1]}", "expected a whole number, got a list of 1 value; or"),
        ("{kind: hard}", "requires the argument 'share'"),
    ],
)
def test_arguments_are_checked_by_what_their_author_declares(make, project, arguments, said):
    (project.root / "declared.py").write_text(DECLARED)
    assert said in refusal(make, f"algorithm.loss={{name: 'declared:choosing', arguments: {arguments}}}")


def test_arguments_as_declared_are_taken_as_they_stand(make: Callable[..., Plan], project: Project):
    (project.root / "declared.py").write_text(DECLARED)
    given = {
        "share": 0,
        "kind": "hard",
        "sizes": [1, 2],
        "limit": "anything",
        "either": "x",
        "flag": True,
        "array": [1],
    }
    assert make(f"algorithm.loss={{name: 'declared:choosing', arguments: {given}}}").loss.arguments == given


ENUMERATED = """
from enum import Enum

class Kind(str, Enum):
    SOFT = "soft"
    HARD = "hard"

class Place(Enum):
    LEFT = 1
    RIGHT = 2

def credited(batch, *, kind: Kind = Kind.SOFT, places: tuple[Place, ...] = ()):
    raise NotImplementedError

def lost(view, *, kind: Kind = Kind.SOFT, place: "Place | None" = None):
    raise NotImplementedError

def scored(prompt, response, *, place: Place, **columns):
    raise NotImplementedError
"""


def test_the_value_of_an_enum_becomes_its_member_and_stays_a_value_in_the_config(make, project):
    (project.root / "enumerated.py").write_text(ENUMERATED)
    planned = make(
        "algorithm.loss={name: 'enumerated:lost', arguments: {kind: soft, place: 2}}",
        "algorithm.advantage={name: 'enumerated:credited', arguments: {kind: hard, places: [1, 2]}}",
        "reward={function: 'enumerated:scored', arguments: {place: 1}}",
    )
    kind, place = (getattr(sys.modules["enumerated"], name) for name in ("Kind", "Place"))
    assert planned.loss.arguments == {"kind": kind.SOFT, "place": place.RIGHT}
    assert type(planned.loss.arguments["kind"]) is kind  # equal to its value, and no less a member
    assert planned.advantage.arguments == {"kind": kind.HARD, "places": (place.LEFT, place.RIGHT)}
    assert planned.rewards[0].arguments == {"place": place.LEFT}
    assert planned.config.algorithm.loss.arguments == {"kind": "soft", "place": 2}
    said = refusal(make, "algorithm.loss={name: 'enumerated:lost', arguments: {kind: sof}}")
    assert "kind: expected one of 'soft' or 'hard', got the string 'sof'. Did you mean 'soft'?" in said


def test_arguments_of_a_reward_are_checked_too(make: Callable[..., Plan], project: Project):
    (project.root / "declared.py").write_text(DECLARED)
    said = refusal(make, "reward.function=declared:scaled", "reward.arguments.partial=-1")
    assert (
        "reward.arguments.partial: expected more than 0, got the number -1 (an argument of 'declared:scaled')" in said
    )


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("clip_high=abc", "expected a number, got the string 'abc'"),
        ("clip_high=-0.2", "expected more than 0"),
        ("clip_low=3", "expected at most 1"),
        ("dual_clip=0.5", "expected more than 1"),
        ("importance_cap=0", "expected more than 0"),
        ("max_tokens=0", "expected more than 0"),
        ("aggregation=tokn_mean", "Did you mean 'token_mean'?"),
        ("aggregation=seq-mean-token-sum-norm", "in verl token-mean, seq-mean-token-sum, "),
        ("kl_coefficient=0.1", "set algorithm.kl.coefficient instead"),
        ("kl_estimator=k2", "set algorithm.kl.estimator instead"),
    ],
)
def test_the_clipped_loss_declares_its_arguments(make: Callable[..., Plan], argument: str, said: str):
    refused = refusal(make, f"algorithm.loss.arguments.{argument}", "algorithm.old_logprobs=actor")
    assert f"algorithm.loss.arguments.{argument.partition('=')[0]}: " in refused
    assert said in refused


def test_the_scaled_aggregation_divides_by_the_longest_response_unless_told_otherwise(make: Callable[..., Plan]):
    scaled = "algorithm.loss.arguments.aggregation=sequence_mean_token_sum_scaled"
    assert make(scaled).loss.arguments == {"aggregation": "sequence_mean_token_sum_scaled", "max_tokens": 8}
    assert make(scaled, "algorithm.loss.arguments.max_tokens=5").loss.arguments["max_tokens"] == 5


@pytest.mark.parametrize("arguments", ["{clip_low: 0.1}", "{clip_lo: 0.1, colum: x}"])
def test_arguments_left_from_another_loss_are_taken_away_as_the_message_says(make: Callable[..., Plan], arguments: str):
    other = (f"algorithm.loss.arguments={arguments}", "algorithm.loss.name=weighted_logprob")
    assert "To remove arguments of another loss, set algorithm.loss.arguments={}." in refusal(make, *other)
    assert make(*other, "algorithm.loss.arguments={}").loss.arguments == {}


@pytest.mark.parametrize("kl", ["{target: 0.1}", "{target: 0.1, coefficient: 0.1}", "{target: 0.1, place: reward}"])
def test_a_target_of_the_divergence_without_a_term_in_the_reward_is_refused(make: Callable[..., Plan], kl: str):
    assert "algorithm.kl.target requires a KL term in the reward" in refusal(make, f"algorithm.kl={kl}")


def test_an_advantage_that_reads_a_teachers_logprobs_makes_a_reference(make: Callable[..., Plan]):
    planned = make("algorithm.advantage.name=distillation")
    assert "reference" in [stage.name for stage in planned.stages]
    assert planned.roles["reference"].shares == "actor"
    assert dict(planned.facts)["reference"] == "model, in the actor's processes; for the distillation advantages"


def test_a_file_named_like_a_module_that_is_not_the_users_never_stands_in_for_it(make, project, monkeypatch):
    for name in ("colorsys", "click"):
        (project.root / f"{name}.py").write_text("raise RuntimeError('nobody named this file')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    make()
    assert importlib.import_module("colorsys").rgb_to_hsv
    assert importlib.import_module("click").command


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("colorsys", "is part of the standard library"),
        ("pluggy", "is installed ("),
        ("math", "is part of the standard library"),
    ],
)
def test_a_named_module_that_is_the_users_and_somebody_elses_is_refused(make, project, name, said):
    own = project.root / f"{name}.py"
    own.write_text("def score(prompt, response, **columns): return 0.0")
    refused = refusal(make, f"reward.function={name}:score")
    assert f"reward.function: module {name!r} {said}" in refused
    assert f"{own} has the same name; give your own file another name" in refused
    assert ("pip install -e" in refused) == (name == "pluggy")


def notes_on(make: Callable[..., Any], *overrides: str, about: str) -> list[str]:
    return [note for note in make(*overrides).notes if about in note]


def test_a_learning_rate_beyond_reason_is_noted(make: Callable[..., Plan], make_sft: Callable[..., SFTPlan]):
    for made in (make, make_sft):
        assert notes_on(
            made, "actor.engine.options.lr=1.0e+6", about="lr is 1e+06: rates above 0.01 destroy most models"
        )
        assert not notes_on(made, "actor.engine.options.lr=0.01", about="lr is")


def test_more_processes_than_cores_are_noted(make, make_sft, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    many = ("actor.processes=3", "train.prompts_per_step=16")
    assert notes_on(make, *many, about="the engines have 4 threads in 4 processes, but this machine has 3 cores")
    assert notes_on(make, "cluster.threads_per_process=4", about="the engines have 4 threads in 1 process,")
    assert not notes_on(make, *many, "rollout.replicas=3", about="cores")  # in the actor's processes
    assert not notes_on(make, *many, "cluster.address=10.0.0.1:6379", about="cores")
    assert notes_on(make_sft, "actor.processes=8", about="8 threads in 8 processes")
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert notes_on(make, *many, about="but this machine has 2 cores")


def test_a_rollout_that_is_moved_out_of_the_actors_processes_is_noted(make: Callable[..., Plan]):
    said = "rollout.replicas=2 it would run in the actor's"
    assert notes_on(make, "actor.processes=2", about=said)
    assert not notes_on(make, "actor.processes=2", "rollout.placement=separate", about=said)
    assert not notes_on(make, "actor.processes=2", "rollout.replicas=2", about=said)


def test_clipping_can_be_off_and_numbers_have_their_plural(make: Callable[..., Plan]):
    planned = make("actor.engine.options.max_grad_norm=.inf", "algorithm.epochs=2", "algorithm.minibatches=3")
    assert planned.roles["actor"].options["max_grad_norm"] == float("inf")
    assert "10 steps x 2 epochs x 3 minibatches = 60 optimizer steps" in planned.render()


def test_plans_of_several_projects_in_one_process_find_each_its_own_modules(make, project):
    other = project.root / "other"
    other.mkdir()
    (other / "scoring.py").write_text("def theirs(prompt, response, **columns): return 0.0")
    extend_path([str(other)])
    extend_path([str(project.root)])
    assert make().rewards[0].function == "scoring:right"
    assert sys.path.index(str(project.root)) == sys.path.index(str(other)) - 1


def test_a_secret_of_a_reward_is_named_and_not_held(make: Callable[..., Plan], project: Project, monkeypatch):
    (project.root / "judge.py").write_text("def score(response, api_key, **columns): ...\n")
    judged = "reward.function=judge:score"
    said = refusal(make, judged, "reward.arguments.api_key=sk-12345")
    assert "reward.arguments.api_key holds a secret" in said
    assert "${API_KEY}" in said
    assert "sk-12345" not in said
    named = (judged, "reward.arguments.api_key='${JUDGE_KEY}'")
    assert "there is no environment variable JUDGE_KEY" in refusal(make, *named)
    monkeypatch.setenv("JUDGE_KEY", "sk-12345")
    plan = make(*named)
    assert "sk-12345" not in plan.config.model_dump_json() + plan.render()
    assert insert_variables(plan.config.reward.arguments) == {"api_key": "sk-12345"}


# The whole text


def test_a_plan_of_every_role_is_said_line_by_line(make: Callable[..., Plan], project: Project):
    said = make(
        "algorithm.kl.coefficient=0.1", "rollout.placement=separate", "rollout.replicas=2", "cluster.address=x",
        "data.validation=train.jsonl", "evaluation.engine.backend=torch", "weights.transport=collective",
    ).render()  # fmt: skip
    assert said.splitlines() == [
        "OK: 10 steps",
        "model       model: Qwen3ForCausalLM in float32 (model.dtype is auto: chosen by device)",
        "actor       torch, 1 rank",
        "rollout     torch, 2 replicas, in separate processes (set by rollout.placement)",
        "evaluation  torch, 1 replica, in a separate process; weights by collective before each validation, their "
        "effect checked each time; training continues meanwhile",
        "reference   model, in the actor's processes; 0.1 times the k3 divergence in the loss",
        "weights     by collective (set by weights.transport); their effect checked every 50 updates",
        "reward      scoring:right, in 1 process; a reward that raises or takes more than 30 s ends the run",
        "algorithm   grpo advantages, clipped_policy loss; old logprobs are the rollout's",
        "data        40 prompts in train.jsonl, each used 2 times",
        "a step      8 prompts x 4 samples = 32 samples, at most 256 new tokens, 768 with the longest prompts",
        "validation  prompts: 40 of train.jsonl, answered greedily: 40 answers before the first step and "
        "after the last",
        "the run     10 steps, an optimizer step each",
        "device      cpu (cluster.device)",
        f"results     {project.root / 'runs/one'}",
        "note        all validation prompts of train.jsonl are in train.jsonl too, so validation measures "
        "training prompts",
    ]


def test_a_supervised_plan_is_said_line_by_line(make_sft: Callable[..., SFTPlan], project: Project):
    planned = make_sft("cluster.address=x", "actor.processes=2")
    assert list(planned.roles) == ["actor"]
    assert planned.render().splitlines() == [
        "OK: 5 steps",
        "model    model: Qwen3ForCausalLM in float32 (model.dtype is auto: chosen by device)",
        "actor    torch, 2 ranks",
        "data     40 demonstrations in demonstrations.jsonl, each used 1 times",
        "a step   8 rows, at most 256 tokens",
        "the run  5 steps, an optimizer step each",
        "device   cpu (cluster.device)",
        f"results  {project.root / 'runs/warm'}",
    ]


@pytest.mark.parametrize(
    ("overrides", "nats"),
    [((), 0.02), (("model.dtype=bfloat16",), 0.2), (("model.dtype=bfloat16", "weights.effect_tolerance=0.5"), 0.5)],
)
def test_engines_that_round_more_may_be_further_apart(make, overrides, nats):
    assert make(*overrides).effect_tolerance == nats


def test_a_plan_says_what_it_takes_a_clusters_device_to_be(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_rl.plan.device.visible_gpus", lambda: 0)
    (note,) = (one for one in make("cluster.device=auto", "cluster.address=x").notes if "cluster.device is auto" in one)
    assert "planned for cpu, the device of this machine, and is rejected at the start if the cluster has GPUs" in note
    for known in (("cluster.device=auto",), ("cluster.device=cpu", "cluster.address=x")):
        assert not any("cluster.device is auto" in one for one in make(*known).notes)


NATIVE = """
class Arguments(Base):
    memory_utilization: float = 0.9
    "--not a flag"

    def add(parser):
        parser.add_argument("--tp-size", "-x")
"""


def test_what_an_engine_takes_is_read_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Options(EngineOptions):
        native_sources = ("engine/arguments.py", "engine/fields/*.py")

    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "engine").mkdir(parents=True)
    (packages / "engine" / "arguments.py").write_text(NATIVE)
    python = str(tmp_path / "bin" / "python")
    assert read_native_names(Options.native_sources, python) == {"memory_utilization", "tp_size"}
    assert read_native_names(Options.native_sources, None) == set()
    monkeypatch.syspath_prepend(packages)
    assert read_native_names(Options.native_sources, None) == {"memory_utilization", "tp_size"}

    def said(**native: Any) -> str:
        findings = Findings()
        check_native_names(findings, Options(native=native), "own", python, "rollout")
        return "\n".join(map(str, findings.problems))

    assert said(**{"memory_utilization": 1, "tp-size": 2}) == ""
    assert "rollout.engine.options.native: the engine 'own' has no argument 'memory_utilisation'. Did you mean" in said(
        memory_utilisation=0.5
    )
    assert "no argument 'block'. The arguments are declared in engine/arguments.py and engine/fields/*.py" in said(
        block=1
    )


def test_a_quantized_model_is_not_trained(make: Callable[..., Plan], project: Project):
    place = project.root / "model" / "config.json"
    described = json.loads(place.read_text())
    place.write_text(json.dumps(described | {"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(UserError, match=r"model\.path: config\.json in model has a quantization_config \(gguf\)"):
        make()
    place.write_text(json.dumps(described | {"quantization_config": None}))
    assert make().roles["actor"].trained


@pytest.mark.parametrize("file", ["model/config.json", "model/tokenizer_config.json"])
def test_a_model_whose_json_is_nested_beyond_reading_is_refused(make: Callable[..., Plan], project: Project, file: str):
    (project.root / file).write_text("[" * 50_000)
    with pytest.raises(UserError, match=r"nested too deeply|no chat template"):
        make("data.chat_template=true")
