"""Ctrl-C ends a run soon and in order, whatever it is doing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Start
from .run_process import Ended, RunProcess, process_words

pytestmark = pytest.mark.slow

ENDLESS = "train.steps=1000000"
DEADLINE_SECONDS = 60.0
"""How long after Ctrl-C a run may still be there: far more than the few seconds it takes on a quiet machine."""


def interrupted(run: RunProcess) -> Ended:
    run.interrupt()
    ended = run.finish(DEADLINE_SECONDS)
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.err
    assert "Interrupted: ending the run." in ended.err
    assert run.record["status"] == "interrupted"
    assert isinstance(run.spans, list)
    return ended


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_run_is_interrupted_between_workers_calls(train: Start, placement: str):
    run = train(ENDLESS, f"rollout.placement={placement}")
    run.until_step(3)
    alive = {process.pid: process.name() for process in run.processes()}
    assert {run.pid("actor"), run.pid("rollout")} < set(alive)  # so the check for leftovers sees workers,
    assert "raylet" in alive.values()  # and Ray
    ended = interrupted(run)
    assert len(run.metrics) >= 3
    assert_model_saved(run, ended)


def assert_model_saved(run: RunProcess, ended: Ended) -> None:
    """The model is there, loads, and is that of the last step logged or of the one under way."""
    from transformers import AutoModelForCausalLM

    steps = len(run.metrics)
    said = re.search(r"Saved: metrics of (\d+) steps, the model of step (\d+)\. It is all in", ended.err)
    assert said, ended.err
    assert int(said[1]) == steps
    assert int(said[2]) in (steps, steps + 1)
    assert (run.directory / "model").resolve().name == f"step-{int(said[2]):06d}"
    assert AutoModelForCausalLM.from_pretrained(run.directory / "model").num_parameters() == 126_912


def test_a_run_whose_worker_is_stuck_is_interrupted_all_the_same(train: Start, tmp_path: Path):
    run = train(
        ENDLESS, "rollout.placement=separate",
        "algorithm.loss.name=losses:stuck_at", f"algorithm.loss.arguments={{call: 3, marks: {tmp_path}}}",
    )  # fmt: skip
    run.until(lambda: list(tmp_path.iterdir()), "an update that does not end")
    ended = interrupted(run)
    assert "Saved: metrics of 2 steps, no model" in ended.err


def test_a_run_in_one_process_is_interrupted(train: Start):
    run = train(ENDLESS, "cluster.launcher=inline")
    run.until_step(3)
    ended = interrupted(run)
    assert_model_saved(run, ended)


def test_a_start_is_interrupted_while_ray_comes_up(train: Start):
    run = train(ENDLESS)
    run.until(lambda: ray_titles(run), "the first process of Ray's that can become a worker")
    ended = interrupted(run)
    assert "Saved: no metrics yet, no model" in ended.err


def test_a_start_is_interrupted_while_workers_are_built(train: Start):
    run = train(ENDLESS)
    run.until(lambda: ray_titles(run) - {"ray::IDLE"}, "a worker")
    ended = interrupted(run)
    assert "Saved: no metrics yet, no model" in ended.err


def ray_titles(run: RunProcess) -> set[str]:
    """What the processes of Ray's that run Python call themselves: `ray::IDLE`, or by what they run."""
    words = (process_words(process) for process in run.processes())
    return {first for first, *_ in words if first.startswith("ray::")}
