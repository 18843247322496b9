"""Loading a config: overrides, and errors that name the key, the place and the cure."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.errors import ConfigError
from enginehouse_rl.config.load import dump_config, keys, load_config
from enginehouse_rl.config.schema import Config, DPOConfig, SFTConfig

GOOD = """\
model: {path: m}
data:
  train: d.jsonl
reward: {function: "f:g"}
"""


def write(tmp_path: Path, text: str = GOOD) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str, schema: Any = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, schema)
    return str(caught.value)


def test_defaults_fill_all_that_the_file_leaves_out(tmp_path: Path):
    text = "model: {path: m}\ndata: {train: d.jsonl}\n"
    assert load_config(write(tmp_path, text)) == Config.model_validate(yaml.safe_load(text))


def test_a_tilde_in_any_path_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No shell puts it for one in a YAML file, nor in an override; `run.directory: ~/runs` made a directory `~`."""
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, GOOD.replace("path: m", "path: ~/m").replace("d.jsonl", "{~/a.jsonl: 3, b~.jsonl: 1}"))
    config = load_config(
        path, ["run.directory=~/runs/one", "data.validation={held: ~/v.jsonl}", "reward_model.path=~/judge"]
    )
    assert config.model.path == "/home/me/m"
    assert config.data.train == {"/home/me/a.jsonl": 3, "b~.jsonl": 1}
    assert config.data.validation == {"held": "/home/me/v.jsonl"}
    assert config.reward_model.path == "/home/me/judge"
    assert config.run.directory == "/home/me/runs/one"
    listed = load_config(path, ["data.train=[~/a.jsonl]"])
    assert listed.data.train == ["/home/me/a.jsonl"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.path", "${DATA}/m"),
        ("reward_model.path", "$DATA/judge"),
        ("run.directory", "runs/$DATA"),
        ("data.train", "${DATA}/x.jsonl"),
        ("data.train", "[a.jsonl, '${DATA}/x.jsonl']"),
        ("data.train", "{'${DATA}/x.jsonl': 2}"),
        ("data.validation", "${DATA}/x.jsonl"),
        ("data.validation", "{held: '${DATA}/x.jsonl'}"),
    ],
)
def test_a_variable_in_a_path_is_refused_with_what_takes_one(tmp_path: Path, key: str, value: str):
    """It would be part of a file's name; `run.directory: ${HOME}/runs` made a directory of that name."""
    said = refusal(write(tmp_path), f"{key}={value}")
    assert f"{key} (in the override {f'{key}={value}'!r}): $" in said
    assert "is not replaced in a path; only ~ is, by the home directory" in said
    assert "${NAME} works in engine.env, and in arguments" in said
    assert "\n" not in said


def test_a_dollar_in_a_name_is_no_variable(tmp_path: Path):
    assert load_config(write(tmp_path), ["data.train=a$b/c$.jsonl"]).data.train == "a$b/c$.jsonl"


@pytest.mark.parametrize("value", ["${DATA}/x.jsonl", "[a.jsonl, '${DATA}/x.jsonl']"])
def test_a_variable_in_a_path_of_preferences_is_refused_alike(tmp_path: Path, value: str):
    path = write(tmp_path, "model: {path: m}\ndata: {train: d.jsonl}\n")
    with pytest.raises(ConfigError, match="is not replaced in a path") as caught:
        load_config(path, [f"data.validation={value}"], DPOConfig)
    assert "\n" not in str(caught.value)


def test_float16_is_refused_with_the_reason(tmp_path: Path):
    said = refusal(write(tmp_path), "model.dtype=float16")
    assert "model.dtype (in the override 'model.dtype=float16'): no engine trains in float16" in said
    assert "use bfloat16" in said


def test_overrides_win_over_the_file_and_are_yaml(tmp_path: Path):
    config = load_config(
        write(tmp_path),
        [
            "rollout.engine.backend=vllm",
            "train.steps=3",
            "train.steps=4",
            "actor.engine.options.lr=1e-3",
            "rollout.sampling.stop=[a, 'b=c']",
            "data.validation=null",
        ],
    )
    assert config.rollout.engine.backend == "vllm"
    assert config.train.steps == 4
    assert config.actor.engine.options == {"lr": 1e-3}
    assert config.rollout.sampling.stop == ["a", "b=c"]
    assert config.data.validation is None


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("end with #### and a number", "end with #### and a number"),
        ("# first", "# first"),
        ("&a", "&a"),
        ("'a # b'", "a # b"),
        ("a#b", "a#b"),
    ],
)
def test_a_command_line_has_no_comments_and_no_anchors(tmp_path: Path, given: str, read: str):
    assert load_config(write(tmp_path), [f"data.system={given}"]).data.system == read


def test_an_override_reaches_into_a_section_that_the_file_leaves_empty(tmp_path: Path):
    assert load_config(write(tmp_path, GOOD + "train:\n"), ["train.steps=7"]).train.steps == 7


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("rollot: {}", "unknown key 'rollot' (line 5). Did you mean 'rollout'?"),
        ("train: {stepz: 1}", "unknown key 'train.stepz' (line 5). Did you mean 'steps'?"),
        ("train: {samples_per_prompt: 1}", "Did you mean 'rollout.samples_per_prompt' or 'evaluation."),
        ("evaluation: {backend: vllm}", "'evaluation.backend' (line 5). Did you mean 'evaluation.engine.backend'?"),
        ("rollout: {options: {}}", "'rollout.options' (line 5). Did you mean 'rollout.engine.options'?"),
        ("train:\n  steps: many", "train.steps (line 6): expected a whole number, got the string 'many'"),
        ("train: {steps: 1.5}", "train.steps (line 5): expected a whole number, got the number 1.5"),
        ("train: {steps: true}", "train.steps (line 5): expected a number, not true or false"),
        ("train: {steps: 0}", "train.steps (line 5): expected more than 0, got the number 0"),
        ("train: {seed: -1}", "train.seed (line 5): expected at least 0, got the number -1"),
        ("train: {seed: 9223372036854775808}", "train.seed (line 5): expected less than 9.22337e+18, got the number 9"),
        ("train: {profile_steps: [0]}", "train.profile_steps[0] (line 5): expected more than 0, got the number 0"),
        ("train: {profile_steps: [true]}", "train.profile_steps[0] (line 5): expected a whole number, got true"),
        ("train: {profile_steps: [3, 3]}", "train.profile_steps (line 5): step 3 is listed twice"),
        (
            "train: {steps: 4, profile_steps: [3, 5]}",
            "train.profile_steps (line 5): there is no step 5: the last step is train.steps=4",
        ),
        ("train:", "train (line 5): expected a mapping of keys to values, got nothing (null)"),
        ("algorithm: grpo", "algorithm (line 5): expected a mapping of keys to values, got the string 'grpo'"),
        ("train: {steps: [1]}", "train.steps (line 5): expected a whole number, got a list of 1 value"),
        ("train: {steps: []}", "train.steps (line 5): expected a whole number, got an empty list"),
        ("run: {directory: 5}", "run.directory (line 5): expected a string, got the number 5"),
        ("run: {overwrite: maybe}", "run.overwrite (line 5): expected true or false, got the string 'maybe'"),
        ("rollout: {sampling: {stop: x}}", "rollout.sampling.stop (line 5): expected a list, got the string 'x'"),
        ("rollout: {sampling: {stop: [1]}}", "rollout.sampling.stop[0] (line 5): expected a string, got the number 1"),
        ("rollout: {placement: near}", "one of 'auto', 'colocated', 'shared' or 'separate', got the string 'near'"),
        (
            "rollout: {sampling: {top_p: 1.5}}",
            "rollout.sampling.top_p (line 5): expected at most 1, got the number 1.5",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_place(tmp_path: Path, added: str, said: str):
    assert said in refusal(write(tmp_path, GOOD + added + "\n"))


def test_missing_keys_are_named_with_what_they_are_for(tmp_path: Path):
    said = refusal(write(tmp_path, "data: {}\n"))
    assert "missing key 'model': The model to train, as a Hugging Face directory, GGUF file or hub name" in said
    assert "missing key 'data.train': File of training prompts" in said


def test_all_problems_of_file_and_overrides_are_in_one_message(tmp_path: Path):
    path = write(tmp_path, GOOD + "rollot: 1\ntrain: {steps: many, seed: x}\n")
    said = refusal(path, "weights.effect_tolerance=big", "nonsense", "train.epochs=2")
    assert said.startswith("6 problems in the config ")
    for part in ("rollot", "train.steps (line 6)", "train.seed", "in the override 'weights.effect_tolerance=big'"):
        assert part in said
    assert "'nonsense' is not of the form dotted.key=value" in said
    assert "unknown key 'train.epochs' (in the override 'train.epochs=2'). Did you mean 'algorithm.epochs'?" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "is not of the form dotted.key=value"),
        ("=3", "is not of the form dotted.key=value"),
        ("train..steps=3", "is not of the form dotted.key=value"),
        ("model.path.x=3", "sets a key inside model.path, but model.path is no section: it holds the string 'm'"),
        ("train.steps={a: 1", "line 1, is not valid YAML"),
        ("nothing.at.all=3", "unknown key 'nothing' (in the override 'nothing.at.all=3')"),
        ("+train.steps=3", "the override '+train.steps=3': in verl +key=value, ++key=value; in enginehouse key=value"),
        ("++train.steps=3", "the override '++train.steps=3': in verl +key=value"),
        ("~train.steps", "the override '~train.steps': in verl ~key; in enginehouse "),
    ],
)
def test_an_override_that_cannot_be_applied_says_why(tmp_path: Path, override: str, said: str):
    assert said in refusal(write(tmp_path), override)


def test_each_wrong_override_is_named_itself(tmp_path: Path):
    path = write(tmp_path, GOOD + "algorithm:\n  epochs: 1\nsome: {thing: 1}\ntrain: {steps: 1, seed: x}\n")
    wrong = ["trainer.logger=x", "trainer.resume_mode=y", "algorithm.kl_ctrl.kl_coef=0.1"]
    unheard = ["nothing.at=1", "nothing.there=2", "some.more=2"]
    lines = refusal(path, *wrong, *unheard).splitlines()
    for override in wrong:
        (line,) = [line for line in lines if f"unknown key '{override.partition('=')[0]}'" in line]
        assert f"(in the override {override!r})" in line
    assert "unknown key 'nothing' (in the override 'nothing.at=1', in the override 'nothing.there=2')" in str(lines)
    assert "unknown key 'some' (line 7, in the override 'some.more=2')" in str(lines)


def test_what_an_override_replaced_is_not_blamed(tmp_path: Path):
    path = write(tmp_path, GOOD + "train: {steps: 1, seed: x}\n")
    said = refusal(path, "train.steps=many", "train={steps: 0}")
    assert said.endswith("train.steps (in the override 'train={steps: 0}'): expected more than 0, got the number 0")


def test_a_missing_file_is_told_with_the_nearest(tmp_path: Path):
    write(tmp_path)
    assert "Did you mean 'run.yaml'?" in refusal(tmp_path / "runn.yaml")
    assert "does not exist either" in refusal(tmp_path / "nowhere" / "run.yaml")
    assert "is a directory, not a config file" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words\n"])
def test_a_file_that_holds_no_sections_is_refused(tmp_path: Path, text: str):
    assert "must contain a mapping of sections" in refusal(write(tmp_path, text))


def test_an_empty_file_lacks_its_required_keys(tmp_path: Path):
    assert "missing key 'model'" in refusal(write(tmp_path, ""))


def test_a_supervised_config_is_its_own_type(tmp_path: Path):
    said = refusal(write(tmp_path), schema=SFTConfig)
    assert "unknown key 'reward'" in said
    assert said.startswith("This looks like a config for `enginehouse train`. Check it with `enginehouse plan`.\n")


def test_a_config_of_another_command_is_told_whose_it_is(tmp_path: Path):
    path = write(tmp_path, "model: {path: m}\ndata: {train: d.jsonl, response: answer}\n")
    said = refusal(path, "train.steps=3")
    assert "unknown key 'data.response'" in said
    assert said.startswith("This looks like a config for `enginehouse sft`. Check it with `enginehouse plan --sft`.\n")
    assert "looks like a config for" not in refusal(path, "train.samples_every=3", schema=SFTConfig), (
        "the override is at fault"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward.functions.a.functon=x", "unknown key 'reward.functions.a.functon' (in the override"),
        ("reward.functions.a.functon=x", "Did you mean 'function'?"),
        (
            "reward.functions.a.weight=2",
            "missing key 'reward.functions.a.function': Registered name of a reward function, or m",
        ),
        ("reward.functions.a.weight=x", "reward.functions.a.weight"),
        ("reward.functions.a.clip=[1, 0]", "expected the smallest score before the largest"),
        ("reward.functions.a.normalize=step", "expected one of 'none', 'group' or 'batch'"),
        ("reward.functions={'a/b': {function: x}}", "reward.functions"),
        ("reward.functions.a.function=x", "expected function or functions, not both"),
        ("reward={arguments: {x: 1}, functions: {a: {function: x}}}", "expected no arguments beside functions"),
    ],
)
def test_what_is_wrong_with_one_of_several_rewards_is_said(tmp_path: Path, override: str, said: str):
    assert said in refusal(write(tmp_path), override)


def test_several_rewards_read_back_as_they_were_written(tmp_path: Path):
    several = "reward={functions: {b: {function: x, clip: [-1, 1]}, a: {function: y, normalize: group}}}"
    config = load_config(write(tmp_path), [several])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "again.yaml")
    assert again == config
    assert list(again.reward.list_rewards()) == ["b", "a"]


def test_the_config_has_at_most_so_many_options():
    unset = {(role, "engine") for role in ("evaluation", "reference", "critic", "reward_model")}
    unset |= {("rollout", "keep"), ("run", "trackers"), ("stages", "NAME")}
    # Each of those is one. The last to come were evaluation.benchmarks, rollout.cache_at_update and weights.adapter.
    assert len({path[:2] if path[:2] in unset else path for path in keys(Config)}) <= 122


def test_every_option_of_one_section_is_documented_or_plain():
    assert all(name.isidentifier() for path in keys(Config) for name in path)


words = st.text(max_size=8).filter(lambda text: "$" not in text and not text.startswith("~"))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
values = st.recursive(plain, lambda i: st.lists(i, max_size=2) | st.dictionaries(words, i, max_size=2), max_leaves=4)
arguments = st.dictionaries(words, values, max_size=2)
configs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": words}),
        "data": st.fixed_dictionaries({"train": words, "validation": st.none() | words}),
        "reward": st.fixed_dictionaries({"function": words, "arguments": arguments}),
    },
    optional={
        "actor": st.fixed_dictionaries({"engine": st.fixed_dictionaries({"options": arguments})}),
        "rollout": st.fixed_dictionaries(
            {"sampling": st.fixed_dictionaries({"temperature": st.floats(0, 10), "stop": st.lists(words, max_size=3)})}
        ),
        "train": st.fixed_dictionaries({"steps": st.integers(1, 10**9), "seed": st.integers(0, 2**63 - 1)}),
        "plugins": st.fixed_dictionaries({"enabled": st.none() | st.lists(words, max_size=2)}),
    },
)


@given(configs)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_dumped_config_reloads_equal(tmp_path: Path, data: dict[str, Any]):
    config = Config.model_validate(data)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config
