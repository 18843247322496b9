"""Runs on preferences, whole but small: what is learned ranks held-out pairs, and a run goes on where it stopped."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse.errors import EnginehouseError
from enginehouse_rl.metrics import find_metric
from enginehouse_rl.preferences.loop import PreferenceTrainer
from enginehouse_testing.models import tiny_model

LETTERS = "abcdefghijklmn"


def responses(draw: random.Random) -> tuple[str, str]:
    """A good one, of even letters, and a bad one, of odd ones."""
    return tuple("".join(draw.choices(LETTERS[first::2], k=3)) for first in (0, 1))  # type: ignore[return-value]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model(), "model")
    draw = random.Random(0)
    for name, count in (("train", 200), ("held_out", 60)):
        prompts = ["".join(draw.choices("0123456789", k=4)) + "=" for _ in range(count)]
        both = [responses(draw) for _ in prompts]
        pairs = [{"prompt": p, "chosen": good, "rejected": bad} for p, (good, bad) in zip(prompts, both, strict=True)]
        write(tmp_path / f"{name}.jsonl", pairs)
        rated = [
            {"prompt": prompt, "completion": both[row][row % 2], "label": row % 2 == 0}
            for row, prompt in enumerate(prompts)
        ]
        write(tmp_path / f"{name}_rated.jsonl", rated)
    config = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "validation": "held_out.jsonl", "max_tokens": 16},
        "actor": {"engine": {"options": {"lr": 3e-3}}},
        "train": {"steps": 20, "rows_per_step": 32},
        "cluster": {"launcher": "inline", "device": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def run(command: str, name: str, *overrides: str) -> list[dict[str, Any]]:
    """Run a command to its end; returns the metrics of its steps."""
    done = CliRunner().invoke(main, [command, "run.yaml", f"run.directory=runs/{name}", *overrides])
    assert done.exit_code == 0, done.output
    assert "validation/accuracy: " in done.output
    lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    assert all(map(find_metric, lines[-1]))
    return lines


KTO = ("algorithm.loss=kto", "data.train=train_rated.jsonl", "data.validation=held_out_rated.jsonl")


@pytest.mark.slow
def test_a_reward_model_ranks_held_out_pairs_and_is_one_of_transformers(house: Path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    metrics = run("rm", "reward")
    assert (metrics[0]["margin"], metrics[0]["accuracy"]) == (0, 0.5)  # a fresh head scores 0
    last = metrics[-1]
    assert last["validation/accuracy"] > 0.9
    assert {"loss", "margin", "rewards/chosen", "rewards/rejected", "lr", "grad_norm"} <= last.keys()
    assert last["margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])

    model = AutoModelForSequenceClassification.from_pretrained("runs/reward/model").eval()
    tokenizer = AutoTokenizer.from_pretrained("runs/reward/model")
    pairs = [json.loads(line) for line in (house / "held_out.jsonl").read_text().splitlines()]
    rows = [f"{pair['prompt']}{pair[which]}<eos>" for pair in pairs for which in ("chosen", "rejected")]
    with torch.no_grad():
        scores = model(**tokenizer(rows, padding=True, return_tensors="pt")).logits.view(-1, 2)
    assert scores.mean(0).tolist() == pytest.approx(
        [last["validation/rewards/chosen"], last["validation/rewards/rejected"]], abs=1e-4
    )


@pytest.mark.parametrize("options", [(), ("algorithm.loss=hinge",), ("algorithm.loss=ipo", "algorithm.beta=0.5"), KTO])
def test_a_policy_learns_to_prefer_what_was_chosen(house: Path, options: tuple[str, ...]):
    metrics = run("dpo", "policy", *options)
    assert abs(metrics[0]["margin"]) < 1e-4  # the policy is the reference yet
    last = metrics[-1]
    assert last["loss"] < metrics[0]["loss"]
    assert last["validation/accuracy"] > 0.9
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert ("kl" in last) == (options == KTO)
    assert metrics[0].get("kl", 0) < 1e-4


def test_a_policy_that_stays_as_it_is_has_no_divergence_from_itself(house: Path):
    """KTO's z0 is at least 0: of one step alone a wrong one may be hidden by that."""
    metrics = run("dpo", "still", *KTO, "actor.engine.options.lr=1e-12", "train.steps=5")
    assert max(row["kl"] for row in metrics) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("command", "options"), [("rm", ()), ("dpo", ()), ("dpo", KTO)], ids=["rm", "dpo", "kto"])
def test_a_resumed_run_is_the_one_that_was_not_interrupted(house: Path, command: str, options: tuple[str, ...]):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def figures(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
        clocks = ("time/", "busy/", "elapsed_seconds", "tokens_per_second", "validation/")
        return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows]

    straight = run(command, "straight", *options, "train.steps=20")
    options = (*options, "run.trackers=[{name: tensorboard}]")
    run(command, "resumed", *options, "train.steps=8", "train.checkpoint_every=8")
    resumed = run(command, "resumed", *options, "train.steps=20", "--resume")
    assert figures(resumed) == figures(straight)
    tracked = EventAccumulator("runs/resumed/tensorboard").Reload().Scalars("loss")
    assert [one.step for one in tracked] == list(range(1, 21))
    assert [one.value for one in tracked] == pytest.approx([row["loss"] for row in straight])
    models = [(house / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert models[0] == models[1]


@pytest.mark.slow
def test_a_run_that_fails_in_a_validation_logs_the_loss_and_goes_on(house: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(self: PreferenceTrainer, held_out: object) -> dict[str, float]:
        raise EnginehouseError("no validation today")

    straight = run("dpo", "straight", "train.steps=6")
    with monkeypatch.context() as patched:
        patched.setattr(PreferenceTrainer, "validate", fails)
        done = CliRunner().invoke(
            main, ["dpo", "run.yaml", "run.directory=runs/failed", "train.steps=6", "train.validate_every=4"]
        )
        assert done.exit_code == 1, done.output
    resumed = run("dpo", "failed", "train.steps=6", "--resume")
    assert [row["loss"] for row in resumed] == [row["loss"] for row in straight]
    assert resumed[-1]["validation/loss"] == straight[-1]["validation/loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [("dpo", ("cluster.launcher=ray", "actor.processes=2", "reference.processes=1")),
     ("rm", ("cluster.launcher=ray", "actor.processes=2", "actor.engine.backend=fsdp"))],
)  # fmt: skip
def test_pairs_that_are_split_over_ranks_are_trained_alike(house: Path, command: str, options: tuple[str, ...]):
    alone = run(command, "alone", "train.steps=4", "train.rows_per_step=5")
    arguments = ["run.yaml", "run.directory=runs/split", "train.steps=4", "train.rows_per_step=5", *options]
    subprocess.run([sys.executable, "-m", "enginehouse.cli.main", command, *arguments], check=True, timeout=200)
    lines = Path("runs/split/metrics.jsonl").read_text().splitlines()
    for one, other in zip(alone, map(json.loads, lines), strict=True):
        same = ("loss", "margin", "rewards/chosen", "grad_norm")
        assert [other[name] for name in same] == pytest.approx([one[name] for name in same], rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_margins_of_the_data_are_taken_off(house: Path):
    for file in (house / "train.jsonl", house / "held_out.jsonl"):
        write(file, [json.loads(line) | {"by": 2} for line in file.read_text().splitlines()])
    plain, wide = run("rm", "plain", "train.steps=1"), run("rm", "wide", "train.steps=1", "data.margin=by")
    assert wide[0]["margin"] == plain[0]["margin"]
    assert wide[0]["loss"] > plain[0]["loss"] + 0.5
