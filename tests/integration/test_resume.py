"""A run that was killed or interrupted goes on with `--resume` as if nothing had happened."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import QUICKSTART, SMALL, Start, installed
from .run_process import RunProcess, finished, said

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # each runs several programs one after the other

ENDING = """
# Ends the run from within: SIGNAL when METHOD of a worker group is called for the NUMBERth time. Notes weight versions.
# Of the calls that draw one batch, which may be several, the first counts.
import os, signal
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"
number, method, name = os.environ["TEST_ENDING"].split()
seen = []
drawn = []

@hookimpl
def enginehouse_call_dispatched(group, method):
    if method == "update":  # what is drawn from here on is the next step's
        drawn.clear()
    if method == globals()["method"] and not drawn:
        seen.append(method)
        if method == "draw":
            drawn.append(method)
        if len(seen) == int(number):
            os.kill(os.getpid(), getattr(signal, name))

@hookimpl
def enginehouse_validated(run):
    drawn.clear()

@hookimpl
def enginehouse_weights_updated(run, version):
    with (run.run_directory.path / "versions").open("a") as file:
        print(version, file=file)
"""

STEPS = 8
TASK = (
    *SMALL,
    "reward.function=rewards:varied",
    f"train.steps={STEPS}",
    "train.samples_every=1",
    "train.validate_every=2",
    "data.validation=held_out.jsonl",
)
SUPERVISED = (f"train.steps={STEPS}", "train.rows_per_step=8")
INLINE = "cluster.launcher=inline"

Ends = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def ends(house: Path) -> Ends:
    """Gives the environment of a run that ends itself: `ends(5, "update", "SIGKILL")`."""
    site = installed(house, "ending", ENDING)
    return lambda number, method, signal: {"PYTHONPATH": str(site), "TEST_ENDING": f"{number} {method} {signal}"}


@pytest.fixture(scope="module", autouse=True)
def held_out(house: Path) -> None:
    """A few held-out prompts: validating on all of the quickstart's is not what these tests are about."""
    lines = (house / "examples/quickstart/work/validation.jsonl").read_text().splitlines(keepends=True)
    (house / "held_out.jsonl").write_text("".join(lines[:8]))


@pytest.fixture(scope="module")
def straight(start: Start) -> RunProcess:
    """The run that nothing happened to."""
    return finished(start("train", *TASK, INLINE))


def ended_early(run: RunProcess, code: int) -> str:
    ended = run.finish()
    assert ended.code == code, ended.err
    return ended.err


def resumed(start: Start, command: str, name: str, *overrides: str, **options: Any) -> RunProcess:
    return start(command, *overrides, f"run.directory=runs/{name}", "--resume", name=name, **options)


def figures(run: RunProcess) -> list[dict[str, Any]]:
    """What the steps computed: their metrics without what a clock measured and what was sent when."""
    left_out = ("time/", "busy/", "rollout/", "weights/", "elapsed_seconds", "tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in run.metrics]


def weights(run: RunProcess) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


def trained(run: RunProcess) -> Counter[str]:
    """How many samples of each prompt were trained on."""
    files = [path for path in (run.directory / "samples").iterdir() if "validation" not in path.name]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return Counter(row["prompt"] for row in rows)


def steps_drawn(run: RunProcess) -> list[str]:
    return [span["name"] for span in run.spans if span["name"].startswith("step ")]


def assert_the_same(run: RunProcess, straight: RunProcess) -> None:
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert figures(run) == figures(straight)
    assert run.validations == straight.validations
    assert said(run) == said(straight)
    assert weights(run) == weights(straight)
    elapsed = [row["elapsed_seconds"] for row in run.metrics]
    assert elapsed == sorted(elapsed)


def test_the_runs_here_have_something_to_differ_in(straight: RunProcess):
    assert len({row["reward/mean"] for row in straight.metrics}) > 4
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 for row in straight.metrics[:-1])


@pytest.mark.parametrize("launcher", [pytest.param("inline", marks=pytest.mark.essential), "ray"])
def test_a_killed_run_goes_on_exactly_where_its_checkpoint_was_taken(start, ends, straight, launcher):
    name, here = f"killed-{launcher}", f"cluster.launcher={launcher}"
    task = (*TASK, here, "train.checkpoint_every=3", f"run.directory=runs/{name}")
    run = start("train", *task, name=name, env=ends(6, "update", "SIGKILL"))
    ended_early(run, -9)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]
    assert run.record["status"] == "running"
    run = finished(resumed(start, "train", name, *TASK, here))
    assert run.record["resumed_after"] == 3
    assert run.record["earlier"][0]["status"] == "killed"
    assert_the_same(run, straight)
    assert steps_drawn(run) == [f"step {step}" for step in range(1, STEPS + 1)]


def test_a_killed_run_with_a_critic_goes_on_with_both_optimizers(start: Start, ends: Ends):
    kl = "algorithm.kl={coefficient: 0.1, place: reward, target: 1.0e-4}"
    ppo = (*TASK, "algorithm.advantage.name=gae", "critic.warmup_steps=1", kl, INLINE)
    straight, name = finished(start("train", *ppo)), "killed-ppo"
    task = (*ppo, "train.checkpoint_every=3", f"run.directory=runs/{name}")
    ended_early(start("train", *task, name=name, env=ends(12, "update", "SIGKILL")), -9)  # the 7th step's, of the actor
    run = finished(resumed(start, "train", name, *ppo))
    assert run.record["resumed_after"] == 6
    assert {path.name for path in (run.directory / "checkpoints/step-000006").iterdir() if path.is_dir()} == {
        *("actor", "critic")
    }
    assert_the_same(run, straight)
    assert len({row["kl_coefficient"] for row in run.metrics}) == STEPS


def test_a_killed_run_with_generation_ahead_loses_no_task_and_trains_none_twice(start, ends, straight):
    name = "killed-ahead"
    ahead = (*TASK, "rollout.placement=separate", "train.staleness=2")
    task = (*ahead, "train.checkpoint_every=3", f"run.directory=runs/{name}")
    ended_early(start("train", *task, name=name, env=ends(6, "update", "SIGKILL")), -9)
    run = finished(resumed(start, "train", name, *ahead))
    assert run.record["resumed_after"] == 3
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert trained(run) == trained(straight)
    assert set(trained(run).values()) == {4}
    ages = [row["staleness/max"] for row in run.metrics]
    assert 0 < max(ages) <= 2


def test_a_killed_run_goes_on_with_two_processes_for_one(start: Start, ends: Ends, straight: RunProcess):
    name = "killed-then-two"
    task = (*TASK, "train.checkpoint_every=3", f"run.directory=runs/{name}")
    ended_early(start("train", *task, name=name, env=ends(6, "update", "SIGKILL")), -9)
    run = finished(resumed(start, "train", name, *TASK, "actor.processes=2", "rollout.replicas=2"))
    # The sums over rows are in another order now, the rows the same.
    after, before = run.metrics[3], straight.metrics[3]
    assert after["reward/mean"] == before["reward/mean"]
    assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-3)
    assert after["lr"] == before["lr"]
    assert len(run.metrics) == STEPS


@pytest.mark.fault(
    area="files",
    what="a bit of the newest checkpoint of a killed run is flipped",
    happens="the run resumes from the previous checkpoint, with the same steps and weights to the bit",
    exit_code="0",
    kept="everything up to the step of that checkpoint",
    noticed="before a process starts",
)
def test_a_run_goes_on_exactly_from_the_checkpoint_before_a_damaged_one(start: Start, ends: Ends, straight: RunProcess):
    name = "killed-and-damaged"
    task = (*TASK, INLINE, "train.checkpoint_every=2", f"run.directory=runs/{name}")
    run = start("train", *task, name=name, env=ends(7, "update", "SIGKILL"))
    ended_early(run, -9)
    (file,) = (run.directory / "checkpoints" / "step-000006" / "actor").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run = finished(resumed(start, "train", name, *TASK, INLINE))
    assert run.record["resumed_after"] == 4
    assert_the_same(run, straight)


@pytest.mark.parametrize(
    ("number", "method", "launcher", "step"),
    [
        pytest.param(4, "update", "ray", 4, marks=pytest.mark.exhaustive),  # its result is waited for
        (8, "draw", "inline", 4),  # the prompts of step 5 are drawn
    ],
)
def test_an_interrupted_run_loses_no_step(start, ends, straight, number, method, launcher, step):
    name = f"interrupted-{launcher}-{method}-{number}"
    task = (*TASK, f"cluster.launcher={launcher}", f"run.directory=runs/{name}")
    run = start("train", *task, name=name, env=ends(number, method, "SIGINT"))
    err = ended_early(run, 130)
    assert f"the model of step {step}. It is all in runs/{name}; --resume continues after step {step}" in err
    assert len(run.metrics) == step
    run = finished(resumed(start, "train", name, *TASK, INLINE, env=ends(0, "none", "SIGINT")))
    assert_the_same(run, straight)
    versions = [int(line) for line in (run.directory / "versions").read_text().split()]
    assert versions == sorted(versions)  # the weights resumed from go by the version they had or were to get
    assert set(versions) == set(range(1, STEPS + 2))


def test_a_supervised_run_goes_on_exactly(start: Start, ends: Ends):
    config = QUICKSTART / "sft.yaml"
    straight = finished(start("sft", *SUPERVISED, INLINE, config=config))
    name = "killed-sft"
    task = (*SUPERVISED, INLINE, "train.checkpoint_every=2", f"run.directory=runs/{name}")
    run = start("sft", *task, config=config, name=name, env=ends(6, "update", "SIGKILL"))
    ended_early(run, -9)
    run = finished(resumed(start, "sft", name, *SUPERVISED, INLINE, config=config))
    assert run.record["resumed_after"] == 4
    assert figures(run) == figures(straight)
    assert weights(run) == weights(straight)
    assert len({row["loss"] for row in straight.metrics}) == STEPS


@pytest.mark.exhaustive
def test_a_sharded_run_goes_on_exactly(start: Start, ends: Ends):
    sharded = ("actor.engine.backend=fsdp", "actor.processes=2", "rollout.replicas=2")
    name = "killed-sharded"
    task = (*TASK, *sharded, "train.checkpoint_every=2", f"run.directory=runs/{name}")
    straight = finished(start("train", *TASK, *sharded))
    run = start("train", *task, name=name, env=ends(6, "update", "SIGKILL"))
    ended_early(run, -9)
    run = finished(resumed(start, "train", name, *TASK, *sharded))
    assert run.record["resumed_after"] in (2, 4)  # 2: the fourth step's was still being written
    assert_the_same(run, straight)
