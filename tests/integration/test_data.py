"""Data of a real run: files by weight, in an order, validated by majority, the best model kept; all of it resumed."""

import json
from pathlib import Path

import pytest

from .conftest import SMALL, Start
from .run_process import RunProcess, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASK = (
    *SMALL,
    "cluster.launcher=inline",
    "actor.engine.options.schedule=constant",
    "reward={functions: {right: {function: exact_match}, varied: {function: 'rewards:varied'}}}",
    "data.train={gsm/train.jsonl: 3, code/train.jsonl: 1}",
    "data.order_by=level",
    "data.validation=code/train.jsonl",
    "evaluation={samples_per_prompt: 2, sampling: {temperature: 1}}",
    "train={prompts_per_step: 4, validate_every: 1, samples_every: 1, save_every: 1, models_kept: 1, "
    "save_best: validation/varied, checkpoint_every: 1, steps: 4}",
)


def said(run: RunProcess, step: int) -> list[dict]:
    path = run.directory / "samples" / f"step-{step:06}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_by_weight_in_an_order_are_trained_on_and_the_best_model_is_kept(start: Start, house: Path):
    for name, rows in (("gsm", 6), ("code", 4)):
        (house / name).mkdir()
        lines = [{"prompt": f"{n}{rows}=", "answer": "1", "level": -n} for n in range(rows)]
        (house / name / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    straight = finished(start("train", *TASK))
    assert [line["data/gsm/train/epoch"] for line in straight.metrics][-1] == pytest.approx(12 / 6, abs=0.4)
    prompts = [row["prompt"] for step in (1, 2, 3, 4) for row in said(straight, step)[::4]]
    gsm = [prompt for prompt in prompts if prompt.endswith("6=")]
    assert gsm[:6] == [f"{n}6=" for n in range(5, -1, -1)]
    values = {line["step"]: line["validation/varied"] for line in straight.validations[1:]}
    best = straight.record["best"]
    assert best["value"] == max(values.values()) == values[best["step"]]
    assert sorted(path.name for path in (straight.directory / "models").iterdir()) == ["best", "step-000004"]
    assert all("validation/majority@2" in line for line in straight.validations)
    assert all(row["answer"] == row["response"].strip() for row in said(straight, 1) if row["response"].strip())

    there = (*TASK, "run.directory=runs/cut")
    finished(start("train", *there, "train.steps=2", name="cut"))
    cut = finished(start("train", *there, "--resume", name="cut"))
    for step in (1, 2, 3, 4):
        assert said(cut, step) == said(straight, step)
    assert cut.record["best"] == best
    assert sorted(path.name for path in (cut.directory / "models").iterdir()) == ["best", "step-000004"]


def test_a_metric_that_validations_turn_out_not_to_measure_ends_the_run_before_its_first_step(start, house):
    (house / "held.jsonl").write_text(json.dumps({"prompt": "1=", "answer": "1"}) + "\n")
    held = ("data.validation=held.jsonl", "reward.function=exact_match", "train.save_best=validation/tidy")
    run = start("train", *SMALL, *held, "data.train=held.jsonl", "train.prompts_per_step=1", "cluster.launcher=inline")
    ended = run.finish()
    assert ended.code == 2, ended.err
    assert "train.save_best: the validation at step 0 has no metric 'validation/tidy'. " in ended.err
    assert run.metrics == []
