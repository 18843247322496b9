"""Runs whose episodes are played in environment workers."""

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from enginehouse_recipes.sorting import write_lines

from .conftest import Start, installed
from .run_process import RunProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN = ("train.steps=4", "train.samples_every=1", "train.checkpoint_every=2")
NO_ROWS = """
# The program itself reads no row.
from enginehouse.controller import assembly
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"

def refuse(*shard):
    raise AssertionError("the controller reads rows")

@hookimpl
def enginehouse_run_started(run):
    assembly._read = refuse
"""
TESTS = str(Path(__file__).parents[1])
OF_TIME = (
    "time/", "rollout/", "busy/", "episode/seconds", "episode/in_tools", "feed/worker_restarts", "elapsed_seconds",
    "tokens_per_second",
)  # fmt: skip


def assert_alike(
    train: Start, *overrides: str, env: Mapping[str, str] | None = None, rounding: float = 0.0
) -> tuple[RunProcess, RunProcess]:
    """Episodes of the controller and of a worker give the same figures; returns both runs, at their end."""
    ways = "cluster.launcher=inline", "environment.processes=1"
    runs = train(*overrides, ways[0], env=env), train(*overrides, ways[1], env=env)
    for run in runs:
        ended = run.finish()
        assert (ended.code, ended.err) == (0, "")
    alone, worker = (
        [{name: value for name, value in line.items() if not name.startswith(OF_TIME)} for line in run.metrics]
        for run in runs
    )
    assert worker == [pytest.approx(line, rel=rounding, abs=rounding) for line in alone]
    return runs


def test_a_run_with_an_environment_worker_is_that_of_the_controller_alone(train: Start):
    """Also where columns come from several places: from the worker, the actor and the reference."""
    both = (
        *RUN,
        "reward.function=rewards:varied",
        "algorithm.old_logprobs=actor",
        "algorithm.kl={coefficient: 0.01, place: reward}",
    )
    runs = assert_alike(train, *both)
    for step in (1, 4):
        lines = [(run.directory / f"samples/step-{step:06d}.jsonl").read_text().splitlines() for run in runs]
        for inline, apart in zip(*[map(json.loads, one) for one in lines], strict=True):
            here, there = inline.pop("by_token"), apart.pop("by_token")
            assert apart == inline
            for name in ("logprob", "advantage"):  # which are rounded, after what was rounded elsewhere
                ours, theirs = ([value or 0.0 for value in one.pop(name)] for one in (here, there))
                assert theirs == pytest.approx(ours, rel=2e-3, abs=1e-5)
            assert there == here


def test_several_rewards_are_weighed_alike_wherever_they_are_scored(train: Start):
    several = (
        "train.steps=2",
        "train.samples_every=1",
        "reward.function=null",
        "reward.functions.varied={function: 'rewards:varied', weight: 2, normalize: group}",
        "reward.functions.size={function: length, arguments: {target: 3}, clip: [-0.5, 0]}",
        "reward.functions.same={function: length, arguments: {target: 3}, normalize: batch}",
        "reward.functions.said={function: 'rewards:said'}",
    )
    runs = assert_alike(train, *several)
    assert {"reward/varied", "reward/size", "reward/same"} < set(runs[0].metrics[0])
    for run in runs:
        sample = json.loads((run.directory / "samples/step-000002.jsonl").read_text().splitlines()[0])
        assert sample["reward/size"] == sample["reward/same"] <= 0
        assert sample.get("answer", "") == sample["response"][:1]


def test_samples_of_older_weights_come_from_workers_too(train: Start):
    run = train(
        "train.steps=6", "train.staleness=2", "rollout.placement=separate", "rollout.replicas=2",
        "environment.processes=2", "rollout.keep.name=mixed_rewards", "rollout.extra_groups=2",
        "reward.function=rewards:varied",
    )  # fmt: skip
    run.finished()
    assert len(run.metrics) == 6
    assert all(line["staleness/max"] <= 2 for line in run.metrics)


def test_a_reward_that_fails_for_all_rows_ends_the_step_however_many_workers_score_them(train: Start):
    run = train(*RUN, "reward.function=rewards:failing", "reward.on_error=zero", "environment.processes=2")
    ended = run.finish()
    assert ended.code == 1
    assert "more than reward.max_failures=0.5 allows" in ended.err
    assert run.metrics == []


@pytest.mark.fault(
    area="processes",
    what="an environment worker is killed, `rollout.on_failure` is `fail`",
    happens="the run ends and names task, role, rank, node and pid",
    exit_code="1",
    kept="checkpoint and model of the last update",
    noticed="at once, in the error",
)
def test_a_worker_that_dies_ends_the_run_and_is_named(train: Start, house: Path):
    """Until then no row has passed the controller."""
    env = {"PYTHONPATH": str(installed(house, "no_rows", NO_ROWS))}
    run = train("train.samples_every=0", "train.steps=400", "environment.processes=2", env=env)
    run.until_step(3)
    os.kill(run.pid("environment", 1), signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 1
    assert re.search(r"task \d+ .*environment-1 rank 0 \(node \S+, pid \d+\): the process died", ended.err, re.DOTALL)
    assert "rollout.on_failure decides what happens after a failure" in ended.err
    assert run.record["status"] == "failed"


@pytest.mark.fault(
    area="processes",
    what="an environment ends its worker's process, crashes it or blocks it, `rollout.on_failure` is not `fail`",
    happens=(
        "the worker's episodes in progress are dropped, or played again with `retry`. The worker is restarted, up "
        "to 3 times without finishing a task in between. Other workers continue"
    ),
    exit_code="0",
    kept="everything",
    noticed=(
        "at once (`feed/failed_worker`, `feed/worker_restarts`). A blocked worker: after `cluster.call_timeout_seconds`"
    ),
)
@pytest.mark.parametrize("way", ["ends_its_process", "blocks"])
def test_a_worker_that_its_environment_ends_costs_the_episodes_that_it_had_under_way(train, house, way):
    rows = [{"prompt": f"s{number}=", "hostile": not number} for number in range(8)]
    write_lines(house / "hostile.jsonl", rows)
    game = f"environment={{name: 'hostile_environments:Hostile', arguments: {{way: {way}}}, processes: 2}}"
    run = train(
        game, "data.train=hostile.jsonl", "data.validation=null", "reward.function=null", "train.steps=3",
        "train.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.sampling.max_tokens=1",
        "rollout.on_failure=drop", "cluster.call_timeout_seconds=20", "train.samples_every=1",
        env={"PYTHONPATH": TESTS},
    )  # fmt: skip
    ended = run.finished()
    assert sum(line["feed/failed_worker"] for line in run.metrics) >= 4
    assert sum(line["feed/worker_restarts"] for line in run.metrics) >= 1
    assert "is lost and is started again" in ended.err
    assert ("time.sleep(3600)" in ended.err) == (way == "blocks")
    written = [row for step in (1, 2, 3) for row in run.samples(step)]
    assert len(written) == 3 * 16
    assert not any(row["prompt"] == "s0=" for row in written)
    assert all(len(row["turns"]) == 2 and row["turns"][0]["tokens"] == 1 for row in written)
    assert any(span["name"] == "in tools" for span in run.spans)
