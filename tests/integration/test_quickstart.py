"""The quickstart as shipped learns its task, wherever its roles run."""

import math

import pytest

from .conftest import QUICKSTART, SHORT, Start, assert_rose
from .run_process import RunFiles, RunProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def colocated(start: Start, warmed_up: RunFiles) -> RunProcess:
    """The run of `grpo.yaml` as it is shipped, at its end."""
    run = start("train", name="quickstart")
    ended = run.finished()
    assert ended.err == ""
    assert "outcome: finished after 250 of 250 steps" in ended.out
    assert 0 < ended.out.index("starting workers: done") < ended.out.index("validation at step 0")
    return run


def test_the_warm_up_lowers_the_loss(warmed_up: RunFiles):
    losses = [line["loss"] for line in warmed_up.metrics]
    assert len(losses) == 100
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert warmed_up.record["status"] == "finished"


@pytest.mark.essential
def test_the_quickstart_learns(colocated: RunProcess):
    first, last = colocated.validations[0], colocated.validations[-1]
    assert (first["step"], last["step"]) == (0, 250)
    assert first["validation/reward"] <= 0.75  # greedily: of samples one in fifty is right
    assert last["validation/reward"] >= 0.95
    rewards = [line["reward/mean"] for line in colocated.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= 0.90
    assert all(line["weights/version"] == line["step"] for line in colocated.metrics)  # no sample is of older weights
    assert colocated.record["status"] == "finished"
    assert colocated.record["steps"] == 250
    assert colocated.pid("actor") == colocated.pid("rollout")


def test_each_step_is_a_line_of_metrics(colocated: RunProcess):
    lines = colocated.metrics
    assert [line["step"] for line in lines] == list(range(1, 251))
    phases = {"generate", "reward", "update", "sync", "step"}
    for line in lines:
        assert {"reward/mean", "loss", "tokens_per_second"} | {f"time/{phase}" for phase in phases} <= set(line)
        assert all(math.isfinite(value) for value in line.values())
        assert line["tokens_per_second"] > 0
        assert line["weights/version"] == line["step"]  # the step's samples came from the update before


def test_samples_show_what_the_model_said(colocated: RunProcess):
    rows = colocated.samples(250)
    assert len(rows) == 256
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert mean == pytest.approx(colocated.metrics[-1]["reward/mean"])
    right = next(row for row in rows if row["reward"] == 1.0)
    assert right["response"] == "".join(sorted(right["prompt"][1:-1]))


def test_the_timeline_shows_every_step(colocated: RunProcess):
    names = [span["name"] for span in colocated.spans]
    assert [name for name in names if name.startswith("step ")] == [f"step {n}" for n in range(1, 251)]
    assert names.count("generate") >= 250


def test_the_trained_model_loads_and_sorts(colocated: RunProcess):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = colocated.directory / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    prompts = [row["prompt"] for row in colocated.samples(250)[::16]]
    batch = torch.tensor([tokenizer(prompt)["input_ids"] for prompt in prompts])
    answers = model.generate(batch, max_new_tokens=7, do_sample=False)[:, batch.shape[1] :]
    said = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [answer == "".join(sorted(prompt[1:-1])) for prompt, answer in zip(prompts, said, strict=True)]
    assert sum(right) >= 0.8 * len(right), list(zip(prompts, said, strict=True))


def test_it_learns_too_with_one_changed_line_and_the_rollout_in_another_process(start, house, warmed_up):
    lines = (house / QUICKSTART / "grpo.yaml").read_text().splitlines()
    changed = [line.replace("placement: auto     ", "placement: separate ") for line in lines]
    assert sum(old != new for old, new in zip(lines, changed, strict=True)) == 1
    (house / QUICKSTART / "separate.yaml").write_text("\n".join(changed))
    run = start("train", *SHORT, config=QUICKSTART / "separate.yaml")
    assert_rose(run)
    assert run.pid("actor") != run.pid("rollout")


def test_two_processes_begin_as_one_does(start: Start, colocated: RunProcess):
    run = start("train", "actor.processes=2", "rollout.replicas=2", "cluster.threads_per_process=1", "train.steps=3")
    run.finished()
    assert run.pid("actor", 0) != run.pid("actor", 1)
    assert len(run.metrics) == 3
    assert run.validations[0] == colocated.validations[0]
    assert run.metrics[0]["reward/mean"] == colocated.metrics[0]["reward/mean"]
    said, said_by_one = ([(row["prompt"], row["response"]) for row in r.samples(1)] for r in (run, colocated))
    assert said == said_by_one
    assert run.metrics[0]["grad_norm"] == pytest.approx(colocated.metrics[0]["grad_norm"], rel=1e-3)
