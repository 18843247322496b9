"""A reward model scores a run's samples as transformers does, and its score is part of the reward."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from enginehouse.cli.main import main
from enginehouse.weights.sync import WeightSync
from enginehouse_rl.steps.reward_model import RewardModelStage

from .conftest import QUICKSTART, SMALL, Start
from .run_process import RunProcess

pytestmark = pytest.mark.slow


def first_samples(run: RunProcess) -> list[dict[str, Any]]:
    """What the first step wrote of its samples."""
    (file,) = (run.directory / "samples").glob("step-000001.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("placed", [["cluster.launcher=inline"], ["reward_model.processes=2"]], ids=["beside", "apart"])
def test_its_score_is_that_of_transformers_and_part_of_the_reward(train: Start, judge: Path, placed: list[str]):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = train("reward.function=rewards:varied", "train.steps=2", "train.samples_every=1", *placed,
                "reward_model.weight=0.25", "reward_model.path=judge")  # fmt: skip
    run.finished()
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    rows = first_samples(run)
    assert len({row["reward/model"] for row in rows}) > 8
    compared = 0
    for row in rows:
        prompt, response = (
            tokenizer(row[part], add_special_tokens=False)["input_ids"] for part in ("prompt", "response")
        )
        ids = prompt + response + [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
        if len(ids) != len(prompt) + row["tokens"]:
            continue  # a special token that the text does not show
        with torch.no_grad():
            score = model(torch.tensor([ids])).logits.item()
        assert row["reward/model"] == pytest.approx(score, abs=1e-4)
        compared += 1
    assert compared > 8
    first = run.metrics[0]
    assert first["reward/model"] == pytest.approx(sum(row["reward/model"] for row in rows) / len(rows), abs=1e-5)
    assert first["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows), abs=1e-5)
    assert run.pid("reward_model") == run.pid("actor") or "processes" in placed[0]


def test_the_functions_reward_and_the_weighted_score_add_up(train: Start, judge: Path):
    task = ("reward.function=rewards:varied", "train.steps=1", "train.samples_every=1", "cluster.launcher=inline")
    both, alone = train(*task, "reward_model={path: judge, weight: 0.25}"), train(*task)
    assert (both.finish().code, alone.finish().code) == (0, 0)
    for row, plain in zip(first_samples(both), first_samples(alone), strict=True):
        assert row["response"] == plain["response"]
        assert row["reward"] == pytest.approx(plain["reward"] + 0.25 * row["reward/model"], abs=1e-5)


def test_no_replica_is_caught_up_while_it_scores(house: Path, judge: Path, monkeypatch: pytest.MonkeyPatch):
    """That is another thread's, which calls the actor's processes: with several each would get the calls in its own
    order."""
    idle, scored = [False], []
    score, trainer_idle = RewardModelStage.__call__, WeightSync.trainer_idle

    @contextmanager
    def watched(sync):
        with trainer_idle(sync):
            idle.append(True)
            yield
            idle.pop()

    monkeypatch.chdir(house)
    monkeypatch.setattr(WeightSync, "trainer_idle", watched)
    monkeypatch.setattr(RewardModelStage, "__call__", lambda *given: (scored.append(idle[-1]), score(*given))[1])
    overrides = (
        "reward.function=rewards:varied",
        "train.steps=2",
        "cluster.launcher=inline",
        "reward_model.path=judge",
    )
    config = str(QUICKSTART / "grpo.yaml")
    done = CliRunner().invoke(main, ["train", config, *SMALL, *overrides, "run.directory=runs/scored"])
    assert done.exit_code == 0, done.output
    assert scored == [False, False]
