"""Signals end a run soon and in order, whatever it is doing and whatever became of Ray."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from .conftest import Start
from .run_process import Ended, RunProcess, process_words

pytestmark = pytest.mark.slow

ENDLESS = "train.steps=1000000"
DEADLINE_SECONDS = 60.0
"""How long after a signal a run may still be there: far more than the few seconds it takes on a quiet machine."""


def interrupted(run: RunProcess, number: signal.Signals = signal.SIGINT) -> Ended:
    run.interrupt(number)
    ended = run.finish(DEADLINE_SECONDS)
    assert ended.code == 128 + number, ended.err
    assert "Traceback" not in ended.err
    assert "Interrupted: ending the run." in ended.err
    assert run.record["status"] == "interrupted"
    assert isinstance(run.spans, list)
    return ended


@pytest.mark.essential
@pytest.mark.fault(
    area="signals",
    what="SIGINT (Ctrl-C) or SIGTERM to the process group of a run",
    happens="the run ends in order: checkpoint, model and last words within run.grace_seconds",
    exit_code="128 + the signal: 130, 143",
    kept="a checkpoint and the model of the last update",
    noticed="at once",
)
@pytest.mark.parametrize(
    ("placement", "number"), [("colocated", signal.SIGTERM), ("separate", signal.SIGINT)], ids=["colocated", "separate"]
)
def test_a_run_is_interrupted_between_workers_calls(train: Start, placement: str, number: signal.Signals):
    run = train(ENDLESS, f"rollout.placement={placement}")
    run.until_step(3)
    alive = {process.pid: process.name() for process in run.processes()}
    assert {run.pid("actor"), run.pid("rollout")} < set(alive)  # so the check for leftovers sees workers,
    assert "raylet" in alive.values()  # and Ray
    ended = interrupted(run, number)
    assert len(run.metrics) >= 3
    assert_model_saved(run, ended)


@pytest.mark.fault(
    area="processes",
    what="a process of Ray's own (raylet, control service) is frozen",
    happens="training goes on; at the end Ray is waited for so long and no longer, and then killed",
    exit_code="as without it",
    kept="a checkpoint and the model of the last update, where the run was interrupted",
    noticed="at the end, 5 to 15 s",
)
def test_a_run_whose_ray_is_frozen_is_interrupted_all_the_same(train: Start):
    run = train(ENDLESS)
    run.until_step(2)
    run.signal_ray("gcs_server", signal.SIGSTOP)
    run.signal_ray("raylet", signal.SIGSTOP)
    ended = interrupted(run)
    assert "its processes are killed" in ended.err
    assert_model_saved(run, ended)


@pytest.mark.fault(
    area="processes",
    what="Ray's control service, started by the run, dies",
    happens="the run ends with an error that says so, before Ray ends it",
    exit_code="1",
    kept="a checkpoint and the model of the last update",
    noticed="at the next call of a worker, within 1 s",
)
def test_a_run_whose_ray_dies_ends_with_a_true_record(train: Start):
    run = train(ENDLESS)
    run.until_step(2)
    run.signal_ray("gcs_server", signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 1, ended.err
    assert "Ray's control service (gcs_server, pid" in ended.err.partition("\nError: ")[2]
    assert (run.record["status"], run.record["steps"]) == ("failed", len(run.metrics))
    assert_model_saved(run, ended)


def assert_model_saved(run: RunProcess, ended: Ended) -> None:
    """Model and checkpoint are there, the model loads, and they are those of the last step logged."""
    from transformers import AutoModelForCausalLM

    steps = len(run.metrics)
    said = re.search(
        r"Saved: metrics of (\d+) steps, the model of step (\d+)\. It is all in .*goes on after step (\d+)", ended.err
    )
    assert said, ended.err
    assert {int(number) for number in said.groups()} == {steps}
    assert (ended.out + ended.err).lower().count("saved: ") == 1
    assert (run.directory / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert (run.directory / "model").resolve().name == f"step-{int(said[2]):06d}"
    assert AutoModelForCausalLM.from_pretrained(run.directory / "model").num_parameters() == 126_912


def test_a_run_whose_worker_is_stuck_is_interrupted_all_the_same(train: Start, tmp_path: Path):
    run = train(
        ENDLESS, "rollout.placement=separate",
        "algorithm.loss.name=losses:stuck_at", f"algorithm.loss.arguments={{call: 3, marks: {tmp_path}}}",
        "run.grace_seconds=12",
    )  # fmt: skip
    run.until(lambda: list(tmp_path.iterdir()), "an update that does not end")
    ended = interrupted(run)
    assert "Saved: metrics of 2 steps, no model" in ended.err


def test_a_run_in_one_process_is_interrupted(train: Start):
    run = train(ENDLESS, "cluster.launcher=inline")
    run.until_step(3)
    ended = interrupted(run)
    assert_model_saved(run, ended)


@pytest.mark.parametrize(
    ("idle", "number"),
    [(set(), signal.SIGTERM), ({"ray::IDLE"}, signal.SIGINT)],
    ids=["while ray comes up", "while workers are built"],
)
def test_a_start_is_interrupted(train: Start, idle: set[str], number: signal.Signals):
    run = train(ENDLESS)
    run.until(lambda: ray_titles(run) - idle, "the first process of Ray's that can become a worker, or that is one")
    ended = interrupted(run, number)
    assert "Saved: no metrics yet, no model" in ended.err


def ray_titles(run: RunProcess) -> set[str]:
    """What the processes of Ray's that run Python call themselves: `ray::IDLE`, or by what they run."""
    words = (process_words(process) for process in run.processes())
    return {first for first, *_ in words if first.startswith("ray::")}
