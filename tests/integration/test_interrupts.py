"""Signals end a run soon and in order, whatever it is doing and whatever became of Ray."""

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from .conftest import SMALL, Start, installed
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


@pytest.mark.fault(
    area="signals",
    what="SIGINT (Ctrl-C) or SIGTERM to the process group of a run",
    happens=(
        "the run stops cleanly: checkpoint, model and final summary. After SIGTERM this takes at most "
        "`run.grace_seconds`"
    ),
    exit_code="128 + the signal: 130, 143",
    kept="a checkpoint and the model of the last update",
    noticed="at once",
)
@pytest.mark.parametrize(
    ("placement", "number"),
    [
        pytest.param("colocated", signal.SIGTERM, marks=pytest.mark.essential, id="colocated"),
        pytest.param("separate", signal.SIGINT, id="separate"),
    ],
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
    happens="training continues. At the end the run waits for Ray for a limited time, then kills it",
    exit_code="as without the fault",
    kept="a checkpoint and the model of the last update, if the run was interrupted",
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
    happens="the run ends with an error that says so, before Ray kills it",
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


def assert_model_saved(run: RunProcess, ended: Ended, parameters: int = 126_912) -> None:
    """Model and checkpoint are there, the model loads, and they are those of the last step logged."""
    from transformers import AutoModelForCausalLM

    steps = len(run.metrics)
    said = re.search(
        r"Saved: metrics of (\d+) steps?, the model of step (\d+)\. It is all in .*continues after step (\d+)",
        ended.err,
    )
    assert said, ended.err
    assert {int(number) for number in said.groups()} == {steps}
    assert (ended.out + ended.err).lower().count("saved: ") == 1
    assert (run.directory / "checkpoints" / f"step-{steps:06d}").is_dir()
    assert (run.directory / "model").resolve().name == f"step-{int(said[2]):06d}"
    assert AutoModelForCausalLM.from_pretrained(run.directory / "model").num_parameters() == parameters


def test_a_run_whose_worker_is_stuck_is_interrupted_all_the_same(train: Start, tmp_path: Path):
    run = train(
        ENDLESS, "rollout.placement=separate",
        "algorithm.loss.name=losses:stuck_at", f"algorithm.loss.arguments={{call: 3, marks: {tmp_path}}}",
        "run.grace_seconds=12",
    )  # fmt: skip
    run.until(lambda: list(tmp_path.iterdir()), "an update that does not end")
    ended = interrupted(run, signal.SIGTERM)
    assert "run.grace_seconds is 12, which is too short; raise it: no state of step 3 was saved" in ended.err
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


SLOW_SAVE = """
# When the actor is to save, it is stopped for longer than run.grace_seconds.
import os, signal, threading
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"
pids = []

@hookimpl
def enginehouse_run_started(run):
    pids.extend(run.roles.actor.pids)

@hookimpl
def enginehouse_call_dispatched(group, method):
    if (group, method) == ("actor", "save"):
        os.kill(pids[0], signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (pids[0], signal.SIGCONT)).start()
"""


@pytest.mark.essential
def test_ctrl_c_waits_for_a_save_that_takes_longer_than_the_grace(train: Start, house: Path):
    site = installed(house, "slow_save", SLOW_SAVE)
    run = train(ENDLESS, "run.grace_seconds=1.5", env={"PYTHONPATH": str(site)})
    run.until_step(2)
    ended = interrupted(run)
    assert_model_saved(run, ended)
    assert f"saving the checkpoint of step {len(run.metrics)} ..." in ended.out


@pytest.fixture(scope="module")
def large_model(house: Path) -> tuple[Path, int]:
    """The quickstart's model, so large that weights and both moments of Adam have 1.6 GB; and its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small, large = house / "examples/quickstart/work/model", house / "large"
    shutil.copytree(small, large)
    config = AutoConfig.from_pretrained(
        small, hidden_size=768, intermediate_size=2880, num_hidden_layers=15, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64, layer_types=["full_attention"] * 15,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(large)
    return large, model.num_parameters()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", range(10))
def test_ctrl_c_at_any_moment_saves_a_large_state_and_model(start: Start, large_model: tuple[Path, int], moment: int):
    run = start("train", *SMALL, ENDLESS, f"model.path={large_model[0]}", "reward.function=rewards:varied",
                "train.prompts_per_step=2", "rollout.samples_per_prompt=2")  # fmt: skip
    run.until(lambda: run.metrics, "step 1", 900)
    time.sleep(random.Random(moment).uniform(0.0, 15.0))
    run.interrupt()
    ended = run.finish(900)
    assert ended.code == 130, ended.err
    assert_model_saved(run, ended, large_model[1])
    (state,) = (run.directory / "checkpoints").glob(f"step-{len(run.metrics):06d}/actor/*.distcp")
    assert state.stat().st_size >= 1.5e9
    assert (run.directory / "report.html").exists()
    shutil.rmtree(run.directory)
