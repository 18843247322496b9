"""Actor and rollout take turns on the same devices: what is learned is the same, and what dies when, ends as said."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import SHORT, SMALL, Start, assert_rose, installed
from .run_process import RunFiles, RunProcess, finished, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
TASK = (
    *SMALL,
    "reward.function=rewards:varied",
    f"train.steps={STEPS}",
    "train.samples_every=1",
    "train.checkpoint_every=1",
    "actor.processes=2",
    "rollout.replicas=2",
)
SHARED = "rollout.placement=shared"

KILLER = """
# Kills a process of ROLE in a phase of the third step's turn: when a call is sent, which may be the nth of its kind.
import os, signal
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"
role, _, phase = os.environ["TEST_KILLED"].partition(" ")
updates, sent, pids, done = [], [], {}, []
CALLS = {
    "generate": ("rollout-1", "draw", 2, 1), "sleep": ("rollout-1", "sleep", 2, 2), "onload": ("actor", "onload", 2, 2),
    "update": ("actor", "update", 3, 1), "wake the weights": ("rollout-1", "wake_up", 3, 1),
    "sync": ("actor", "send_weights", 3, 1), "offload": ("actor", "offload", 3, 2),
    "wake the cache": ("rollout-1", "wake_up", 3, 2),
}

@hookimpl
def enginehouse_run_started(run):
    actor, rollout = run.roles.actor.pids, run.roles.rollout.pids
    pids.update(actor=actor[-1:], rollout=rollout[-1:], rollouts=rollout)

@hookimpl
def enginehouse_call_dispatched(group, method):
    if (group, method) == ("actor", "update"):
        updates.append(1)
        sent.clear()
    whose, what, after, nth = CALLS[phase]
    if len(updates) == after and (group, method) == (whose, what) and not done:
        sent.append(1)
        if len(sent) == nth:
            done.append(1)
            for pid in pids[role]:
                os.kill(pid, signal.SIGKILL)
"""
PHASES = ("generate", "sleep", "onload", "update", "wake the weights", "sync", "offload", "wake the cache")


def assert_same_up_to_rounding(run: RunProcess, other: RunProcess) -> None:
    """Who draws lost rows again, or is back before another, computes them beside others."""
    assert [pytest.approx(row, rel=1e-4, abs=1e-4) for row in figures(other)] == figures(run)
    assert said(run) == said(other)


def figures(run: RunProcess) -> list[tuple[Any, ...]]:
    return [(row["step"], row["reward/mean"], row["grad_norm"], row["loss"]) for row in run.metrics]


@pytest.fixture(scope="module")
def shared(start: Start) -> RunProcess:
    """The run that nothing happens to."""
    return finished(start("train", *TASK, SHARED))


@pytest.fixture(scope="module")
def killer(house: Path) -> Path:
    return installed(house, "turn_killer", KILLER)


@pytest.mark.essential
def test_what_is_drawn_and_learned_is_what_it_is_on_devices_apart(start: Start, shared: RunProcess):
    apart = finished(start("train", *TASK, "rollout.placement=separate"))
    assert figures(shared) == figures(apart)
    assert said(shared) == said(apart)
    assert (shared.directory / "model/model.safetensors").read_bytes() == (
        apart.directory / "model/model.safetensors"
    ).read_bytes()
    for row in shared.metrics:
        assert row["turns/actor/freed_mib"] > 0
        assert row["time/turns"] > 0
    assert not any(name.startswith("turns/") for name in apart.metrics[-1])


@pytest.mark.fault(
    area="processes",
    what="one of several rollout replicas dies in any phase of a turn, with actor and rollout sharing GPUs",
    happens=(
        "another replica takes its requests. It is restarted in the rollout's turn and verified: the same samples "
        "and steps"
    ),
    exit_code="0",
    kept="everything",
    noticed="at its next call",
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_that_is_killed_in_any_phase_of_a_turn_costs_only_time(start, shared, killer, phase):
    run = finished(start("train", *TASK, SHARED, env={"PYTHONPATH": str(killer), "TEST_KILLED": f"rollout {phase}"}))
    assert sum(row["rollout/restarts"] for row in run.metrics) == 1
    assert_same_up_to_rounding(run, shared)


@pytest.mark.fault(
    area="processes",
    what="all rollout replicas die while the actor trains or sends weights, with actor and rollout sharing GPUs",
    happens="they are restarted once the GPUs are free, and verified: the same samples and steps",
    exit_code="0",
    kept="everything",
    noticed="at its next call",
)
@pytest.mark.parametrize("phase", ["update", "sync", "offload"])
def test_replicas_that_are_all_killed_in_the_trainers_turn_cost_only_time(start, shared, killer, phase):
    run = finished(start("train", *TASK, SHARED, env={"PYTHONPATH": str(killer), "TEST_KILLED": f"rollouts {phase}"}))
    assert sum(row["rollout/restarts"] for row in run.metrics) == 2
    assert_same_up_to_rounding(run, shared)


@pytest.mark.parametrize("phase", ["update", "sync"])
def test_the_only_replica_that_is_killed_in_the_trainers_turn_costs_only_time(start, shared, killer, phase):
    env = {"PYTHONPATH": str(killer), "TEST_KILLED": f"rollouts {phase}"}
    run = finished(start("train", *TASK, SHARED, "rollout.replicas=1", env=env))
    assert sum(row["rollout/restarts"] for row in run.metrics) == 1
    assert_same_up_to_rounding(run, shared)


class TestRanks:
    """Many and long: a class, so that they need not wait for the tests above."""

    @pytest.mark.fault(
        area="processes",
        what="a rank of the actor dies in any phase of a turn, with actor and rollout sharing GPUs",
        happens="the run ends with an error that names it; `--resume` takes the same steps",
        exit_code="1",
        kept="the newest checkpoint",
        noticed="at its next call",
    )
    @pytest.mark.parametrize("phase", PHASES)
    def test_a_rank_of_the_actor_that_is_killed_in_any_phase_of_a_turn_is_named_and_the_run_goes_on_by_resume(
        self, start, shared, killer, phase
    ):
        env = {"PYTHONPATH": str(killer), "TEST_KILLED": f"actor {phase}"}
        name = f"killed-{phase.replace(' ', '-')}"
        run = start("train", *TASK, SHARED, f"run.directory=runs/{name}", name=name, env=env)
        ended = run.finish()
        assert ended.code == 1, ended.err
        assert "actor rank 1" in ended.err.partition("\nError: ")[2]
        run = finished(start("train", *TASK, SHARED, f"run.directory=runs/{name}", "--resume", name=name))
        assert figures(run) == figures(shared)
        assert said(run) == said(shared)


def test_the_quickstart_learns_with_fsdp_and_a_torch_rollout_in_turns(start: Start, warmed_up: RunFiles):
    model = f"model.path={warmed_up.directory / 'model'}"
    run = start("train", model, SHARED, "actor.engine.backend=fsdp", *SHORT)
    assert_rose(run)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_quickstart_learns_with_an_engine_of_its_own_environment_in_turns(start, warmed_up, engine):
    run = start("train", *SHORT, SHARED, f"rollout.engine.backend={engine}")
    run.finished(1000)
    rewards = [row["reward/mean"] for row in run.metrics]
    assert sum(rewards[:5]) / 5 <= 0.10
    assert sum(rewards[-5:]) / 5 >= 0.2, rewards
    for row in run.metrics:
        assert row["turns/rollout/freed_mib"] > 0
        assert row["turns/actor/freed_mib"] > 0
        assert row["mismatch/absolute_mean"] <= 1e-4


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_vllm_replica_that_is_killed_while_it_wakes_is_started_again(start: Start, killer: Path):
    env = {"PYTHONPATH": str(killer), "TEST_KILLED": "rollout wake the weights"}
    run = start("train", *TASK, SHARED, "rollout.engine.backend=vllm", env=env)
    run.finished(1000)
    assert len(run.metrics) == STEPS
    assert sum(row["rollout/restarts"] for row in run.metrics) == 1
    for row in run.metrics:
        assert row["mismatch/absolute_mean"] <= 1e-4
