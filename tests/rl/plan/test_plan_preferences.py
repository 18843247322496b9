"""Plans of runs on preferences: what is said of them, and what is refused before anything starts."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from projects import Project, refusal

from enginehouse.cli.main import main
from enginehouse.errors import ConfigError, DataError, UserError
from enginehouse.plugin import PluginManager
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.schema import SCHEMAS, DPOConfig, RMConfig
from enginehouse_rl.plan.plan import PLANS, PreferencePlan, plan_preferences
from enginehouse_rl.plan.resume import find_command
from enginehouse_testing.models import char_tokenizer

Make = Callable[..., PreferencePlan]
KTO = ("algorithm.loss=kto", "data.train=rated.jsonl")


@pytest.fixture
def make(project: Project, plugins: PluginManager) -> Make:
    def make(schema: Any, *overrides: str) -> PreferencePlan:
        path = project.save_preferences()
        return plan_preferences(load_config(path, overrides, schema), plugins, path)

    return make


def test_every_command_that_runs_a_config_has_a_schema_and_a_plan():
    assert PLANS.keys() == SCHEMAS.keys()


def test_a_reward_model_has_a_value_head_and_no_reference(make: Make):
    planned = make(RMConfig, "actor.engine.options.lr=1e-5")
    assert list(planned.roles) == ["actor"]
    assert planned.roles["actor"].model.head == "value"
    assert planned.roles["actor"].options["total_steps"] == 5
    assert find_command(planned.config) == "rm"


def test_dpo_compares_with_the_model_it_begins_from(make: Make, project: Project):
    planned = make(DPOConfig)
    assert planned.roles["reference"].shares == "actor"
    assert planned.roles["reference"].model == planned.roles["actor"].model
    project.make_model("earlier")
    assert make(DPOConfig, "reference.path=earlier").roles["reference"].model.path.endswith("earlier")
    assert find_command(planned.config) == "dpo"


def test_a_plan_is_said_line_by_line(make: Make):
    lines = make(DPOConfig, "data.validation=pairs.jsonl", "train.validate_every=2").render().splitlines()
    assert [line for line in lines if line.startswith(("ref", "alg", "data", "a step", "val", "the run"))] == [
        "reference   model, in the actor's processes",
        "algorithm   sigmoid loss, beta 0.1",
        "data        40 pairs in pairs.jsonl, each used 1 times",
        "a step      8 pairs, at most 512 tokens, computed twice to find the gradient",
        "validation  40 pairs, every 2 steps and after the last step",
        "the run     5 steps, an optimizer step each",
    ]
    assert "40 rated responses in rated.jsonl" in make(DPOConfig, *KTO).render()
    assert "a reward model, by the Bradley-Terry loss" in make(RMConfig).render()


@pytest.mark.parametrize(
    ("schema", "overrides", "kind", "said"),
    [
        (RMConfig, ["data.chosen=better"], DataError, "no column 'better'"),
        (RMConfig, ["data.margin=chosen"], DataError, "column 'chosen' is '1', expected a number"),
        (RMConfig, ["data.validation=nothing.jsonl"], DataError, "no data file nothing.jsonl"),
        (RMConfig, ["rollout.replicas=2"], ConfigError, "unknown key 'rollout'"),
        (RMConfig, ["reference.path=model"], ConfigError, "unknown key 'reference'"),
        (RMConfig, ["actor.processes=9", "cluster.launcher=ray"], ConfigError, "fewer than the 9 processes"),
        (DPOConfig, ["algorithm.loss=dpo"], ConfigError, "algorithm.loss"),
        (DPOConfig, ["algorithm.beta=0"], ConfigError, "algorithm.beta"),
        (DPOConfig, ["algorithm.loss=kto"], DataError, "pairs.jsonl has no column 'completion'"),
        (DPOConfig, [*KTO, "algorithm.label_smoothing=0.1"], ConfigError, "only algorithm.loss=sigmoid takes it"),
        (DPOConfig, ["algorithm.desirable_weight=2"], ConfigError, "only algorithm.loss=kto takes it, not sigmoid"),
        (DPOConfig, [*KTO, "train.rows_per_step=1"], ConfigError, "must be at least 2"),
        (DPOConfig, ["reference.processes=1"], ConfigError, "reference.processes: the reference needs its own"),
        (DPOConfig, ["reference.path=nowhere"], UserError, "reference.path"),
        (DPOConfig, ["reward.function=scoring:right"], ConfigError, "unknown key 'reward'"),
    ],
)
def test_a_run_that_cannot_work_is_refused(make, schema, overrides, kind, said):
    with pytest.raises(kind) as caught:
        make(schema, *overrides)
    assert said in str(caught.value)


def test_a_validation_that_nothing_can_be_read_for_is_noted(make: Make):
    planned = make(DPOConfig, "train.validate_every=2", "data.validation=null")
    assert any("there is no file to validate on (data.validation)" in note for note in planned.notes)


def test_kto_is_not_validated_on_one_row(make: Make, project: Project):
    project.write_rows("one.jsonl", [{"prompt": "1+1=", "completion": "2", "label": True}])
    with pytest.raises(ConfigError, match=r"data\.validation must have at least 2 rows"):
        make(DPOConfig, *KTO, "data.validation=one.jsonl")


def test_a_bad_row_is_named(make: Make, project: Project):
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 9 + [
        {"prompt": "1", "chosen": "2", "rejected": "x" * 99}
    ]
    project.write_rows("pairs.jsonl", [rows[0] | {"rejected": 3}, *rows[1:9]])
    char_tokenizer().save_pretrained(project.root / "model")
    said = refusal(make, DPOConfig, kind=DataError)
    assert "pairs.jsonl, row 1 (line 1): the response in column 'rejected' is a number, expected a string" in said
    project.write_rows("pairs.jsonl", rows)
    said = refusal(make, DPOConfig, kind=DataError)
    assert "pairs.jsonl, row 10 (line 10): prompt and response together has 101 tokens" in said


def test_a_reward_model_needs_room_for_a_token_more(make: Make):
    assert make(DPOConfig, "data.max_tokens=128").row_limit.tokens == 128
    limit = make(RMConfig, "data.max_tokens=128").row_limit
    assert limit.tokens == 127
    assert "leave room for a score" in limit.option


def test_a_backend_without_value_heads_trains_no_reward_model(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginehouse_rl.plan.parts.engines.VALUE_HEAD", "no_backend_has_it")
    with pytest.raises(ConfigError, match=r"actor\.engine\.backend: engine 'torch' cannot train a value head"):
        make(RMConfig)


@pytest.mark.parametrize(("command", "said"), [("dpo", "sigmoid loss"), ("rm", "a reward model")])
def test_the_command_line_plans_and_refuses(project: Project, monkeypatch: pytest.MonkeyPatch, command: str, said: str):
    project.write_tokenizer()
    project.save_preferences()
    done = CliRunner().invoke(main, ["plan", f"--{command}", "preferences.yaml"])
    assert done.exit_code == 0, done.output
    assert said in done.output
    done = CliRunner().invoke(main, [command, "preferences.yaml", "data.chosen=better"])
    assert done.exit_code == 2
    assert "no column 'better'" in done.stderr
    assert not (project.root / "runs").exists()


@pytest.mark.parametrize("schema", [RMConfig, DPOConfig])
def test_pairs_that_teach_nothing_are_counted(project: Project, make: Make, schema: Any):
    project.write_rows("pairs.jsonl", [{"prompt": f"{n}", "chosen": "1", "rejected": str(n % 4)} for n in range(40)])
    (note,) = [note for note in make(schema).notes if "are the same" in note]
    assert "in 10 of the 40 pairs" in note
    assert "row 2 (line 2)" in note
