"""`enginehouse eval`, and validations that an engine of its own answers while the next steps train."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import SMALL, Start
from .run_process import RunProcess, finished

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TASK = (
    *SMALL,
    "reward.function=rewards:varied",
    "data.validation={held: held.jsonl, others: others.jsonl}",
    "evaluation.by=kind",
)
SAMPLED = ("evaluation.samples_per_prompt=2", "evaluation.sampling.temperature=1")
INLINE = "cluster.launcher=inline"


@pytest.fixture(scope="module", autouse=True)
def held_out(house: Path) -> None:
    """A few held-out prompts."""
    rows = [json.loads(line) for line in (house / "examples/quickstart/work/validation.jsonl").read_text().splitlines()]
    for name, some in (("held", rows[:4]), ("others", rows[4:8])):
        lines = [json.dumps({**row, "answer": name, "kind": f"k{n % 2}"}) for n, row in enumerate(some)]
        (house / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def answers(run: RunProcess, step: int) -> list[dict[str, Any]]:
    """What is written of them, logprobs roughly, without the weights' versions: outside a run nobody counts them."""
    lines = (run.directory / "samples" / f"validation-{step:06d}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["by_token"]["version"]
        row["by_token"]["logprob"] = [value and round(value, 1) for value in row["by_token"]["logprob"]]
    return rows


@pytest.mark.parametrize("sampled", [pytest.param((), marks=pytest.mark.essential), SAMPLED], ids=["greedy", "sampled"])
def test_a_model_of_a_run_has_the_figures_of_the_runs_validation(start: Start, house: Path, sampled: tuple[str, ...]):
    run = finished(start("train", *TASK, *sampled, INLINE, "train.steps=2"), 600)
    evaluated = start("eval", *TASK, *sampled, INLINE, f"--model={run.directory.relative_to(house)}")
    ended = evaluated.finish()
    assert (ended.code, ended.err) == (0, "")
    assert evaluated.validations == run.validations[-1:]
    assert answers(evaluated, 2) == answers(run, 2)
    assert {"validation/held/k0/reward", "validation/others/reward"} <= set(evaluated.validations[0])
    table = [line.split()[0] for line in ended.out.splitlines()[-6:]]
    assert table == ["held", "held/k0", "held/k1", "others", "others/k0", "others/k1"]
    record = evaluated.record
    assert record["status"] == "finished"
    assert list(record["roles"]) == ["rollout"]
    assert record["evaluated"]["step"] == 2
    assert record["evaluated"]["checksum"] in ended.out
    assert "served tensors are equal to the model's files" in ended.out


def test_replicas_and_environments_in_processes_of_their_own_evaluate_alike(start: Start, judge: Path):
    task = (*TASK, *SAMPLED, f"reward_model={{path: {judge}, weight: 0.5}}")
    apart = finished(start("eval", *task, "rollout.replicas=2", "environment.processes=1"), 600)
    assert len(apart.record["roles"]["rollout"]) == 2
    assert len(apart.record["roles"]["environment"]) == 1
    together = finished(start("eval", *task, INLINE), 600)
    assert together.validations == apart.validations
    assert together.validations[0]["validation/held/model"] != 0


def test_an_evaluation_that_is_interrupted_claims_nothing(start: Start):
    gated = ("environment.name=gated:Gated", "environment.arguments={directory: nowhere}")  # it waits for ever
    run = start("eval", *TASK, INLINE, *gated)
    run.until(lambda: run.record.get("roles"), "the workers")
    run.interrupt()
    ended = run.finish()
    assert ended.code == 128 + signal.SIGINT
    assert "Saved: no metrics yet" in ended.err
    assert run.validations == []
    assert run.record["status"] == "interrupted"


@pytest.mark.fault(
    area="processes",
    what="the process of `evaluation.engine` dies",
    happens="it is restarted, and serves the weights of the next validation, verified",
    exit_code="0",
    kept="everything",
    noticed="at once, or when the next validation begins",
)
def test_an_evaluation_engine_that_is_killed_is_started_again(start: Start):
    steps = ("train.steps=40", "train.validate_every=20", "evaluation.engine.backend=torch")
    run = start("train", *TASK, *steps)
    run.until(lambda: len(run.validations) > 1, "the validation of step 20")
    os.kill(run.pid("evaluation"), signal.SIGKILL)
    assert [row["step"] for row in finished(run, 600).validations] == [0, 20, 40]


def test_training_goes_on_beside_a_validation_and_a_killed_run_has_the_same_in_the_end(start: Start, house: Path):
    steps = (
        "train.steps=6",
        "train.validate_every=2",
        "train.checkpoint_every=2",
        "train.save_best=validation/held/reward",
    )
    waits = finished(start("train", *TASK, *SAMPLED, *steps, INLINE), 600)
    directory = "runs/beside"
    beside = (
        "train", *TASK, *SAMPLED, *steps, "evaluation.engine.backend=torch", f"run.directory={directory}",
        "environment.name=gated:Gated", f"environment.arguments={{directory: {directory}}}",
    )  # fmt: skip
    killed = start(*beside, name="beside")
    killed.until_step(4)  # the second validation, of step 2, waits for a file, and that of step 4 for the second
    killed.until(lambda: (killed.directory / "checkpoints" / "step-000002").is_dir(), "the checkpoint of step 2")
    assert [line["step"] for line in killed.validations] == [0]
    killed.kill()
    (house / "go").touch()
    resumed = finished(start(*beside, "--resume", name="beside"), 600)
    assert resumed.validations == waits.validations
    assert [answers(resumed, step) for step in (0, 2, 4, 6)] == [answers(waits, step) for step in (0, 2, 4, 6)]
    assert [line["loss"] for line in resumed.metrics] == [line["loss"] for line in waits.metrics]
    assert resumed.record["best"] == waits.record["best"]
    best = [run.directory / "models" / "best" / "model.safetensors" for run in (resumed, waits)]
    assert best[0].read_bytes() == best[1].read_bytes()
