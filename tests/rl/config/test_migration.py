"""Keys and values of verl and TRL are answered with their row of docs/from-verl.md and docs/from-trl.md."""

from pathlib import Path

import pytest

from enginehouse.errors import ConfigError
from enginehouse_rl.config.load import load_config
from enginehouse_rl.config.migration import answer_key, answer_value, read_tables

DOCS = Path(__file__).parents[3] / "docs"
MINIMAL = "model: {path: m}\ndata: {train: t}\nreward: {function: 'r:f'}\n"


def refused(path: Path, *overrides: str, more: str = "") -> str:
    (path / "run.yaml").write_text(MINIMAL + more)
    with pytest.raises(ConfigError) as caught:
        load_config(path / "run.yaml", overrides)
    return str(caught.value)


def test_each_page_shows_its_tables_as_they_stand():
    of_verl, beginning, of_trl = read_tables().partition("| TRL's argument")
    assert of_verl.rstrip() in (DOCS / "from-verl.md").read_text()
    assert beginning + of_trl in (DOCS / "from-trl.md").read_text()


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("actor_rollout_ref.actor.optim.lr", "actor.engine.options.lr"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.engine.options.native (vllm, sglang)"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size", "the reference has the actor's engine, options"),
        ("trainer.total_epochs", "train.steps"),
        ("algorithm.adv_estimator", "algorithm.advantage.name"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl.place"),
        ("loss_agg_mode", "algorithm.loss.arguments.aggregation"),
        ("num_generations", "rollout.samples_per_prompt"),
        ("max_completion_length", "rollout.sampling.max_tokens"),
        ("beta", "algorithm.kl.coefficient"),
        ("trainer.resume_mode", "enginehouse train run.yaml --resume"),
        ("trainer.experiment_name", "run.directory"),
        ("trainer.project_name", "run.directory"),
        ("critic.optim.lr", "critic.engine.options.lr"),
        ("critic.model.path", "critic.path"),
        ("critic.rollout_n", "critic.engine, critic.path"),
        ("reward_model.model.path", "reward_model.path"),
        ("algorithm.lam", "algorithm.advantage.arguments.lam"),
        ("+trainer.logger", "in verl trainer.logger; in enginehouse run.trackers, a list of"),
        ("report_to", "in TRL report_to; in enginehouse run.trackers"),
    ],
)
def test_a_key_of_theirs_is_answered_with_its_row(tmp_path: Path, key: str, answer: str):
    said = refused(tmp_path, f"{key}=1")
    assert f"unknown key {key.lstrip('+')!r} (in the override '{key}=1'): in " in said
    assert answer in said


def test_each_key_of_a_section_of_theirs_is_answered(tmp_path: Path):
    said = refused(tmp_path, more="actor_rollout_ref: {actor: {optim: {lr: 1}, odd: 2}, model: {path: x}}\n")
    assert said.startswith("3 problems")
    assert "'actor_rollout_ref.actor.optim.lr' (line 4): in verl" in said
    theirs = "actor_rollout_ref.model.path"
    assert f"'{theirs}' (line 4): in verl {theirs}; in enginehouse model.path" in said
    assert "'actor_rollout_ref.actor.odd' (line 4): enginehouse has no similar key" in said


def test_a_key_of_ours_that_is_mistyped_is_not_taken_for_theirs(tmp_path: Path):
    for said in (
        refused(tmp_path, "rollout.samplng.temperature=1"),
        refused(tmp_path, more="rollout: {samplng: {temperature: 1}}\n"),
    ):
        assert "Did you mean 'sampling'?" in said
        assert "verl" not in said


def test_a_key_of_ours_in_another_place_is_named_first(tmp_path: Path):
    assert "Did you mean 'rollout.sampling.temperature'?" in refused(tmp_path, "rollout.temperature=1")


def test_a_value_of_theirs_is_answered_with_its_row(tmp_path: Path):
    said = refused(tmp_path, "algorithm.kl.estimator=low_var_kl")
    assert "in verl kl, mse, low_var_kl; in enginehouse k1, k2, k3" in said


def test_what_nobody_has_is_answered_with_nothing():
    assert answer_key("trainer.nothing_of_the_kind") == answer_key("trainer") == ""
    assert answer_value("k4") == ""
