"""What fails in a run, by name: workers that die, rewards that misbehave, weights that arrive damaged."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from .conftest import Start
from .run_process import Ended, RunProcess

pytestmark = pytest.mark.slow

ENDLESS = "train.steps=1000000"


def assert_failed(run: RunProcess, ended: Ended, steps: int | None = None) -> str:
    """The run failed with one message, which is returned; what it had measured is kept."""
    assert ended.code == 1, ended.err
    saved, _, message = ended.err.partition("\nError: ")
    assert "The run failed. Saved: " in saved, ended.err  # after a warning that a random model gets no reward
    assert "\nError: " not in message
    record = run.record
    assert record["status"] == "failed"
    assert record["steps"] == len(run.metrics)
    assert message.startswith(record["error"])
    assert "Traceback" in (run.directory / "error.txt").read_text()
    assert isinstance(run.spans, list)
    if steps is not None:
        assert record["steps"] == steps
    return message


# Workers


def test_a_rank_killed_in_an_update_is_named(train: Start, tmp_path: Path):
    run = train(
        ENDLESS, "actor.processes=2", "rollout.replicas=2",
        "algorithm.loss.name=losses:stuck_at", f"algorithm.loss.arguments={{call: 3, marks: {tmp_path}}}",
    )  # fmt: skip
    run.until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks stuck in their third update")
    pid = run.pid("actor", 1)
    os.kill(pid, signal.SIGKILL)
    message = assert_failed(run, run.finish(), steps=2)
    assert re.match(rf"actor rank 1 \(node \S+, pid {pid}\): the process died during 'update'", message), message
    assert "Traceback" not in message


@pytest.mark.fault(
    area="processes",
    what="the only rollout replica dies",
    happens=(
        "it is restarted and verified, and generates its requests again. After 4 times without a response in "
        "between, the run saves checkpoint and model and ends with an error that names it"
    ),
    exit_code="0; 1",
    kept="everything",
    noticed="at once",
)
def test_the_only_rollout_replica_is_started_again(train: Start):
    run = train("train.steps=60", "rollout.placement=separate")
    run.until_step(3)
    pid = run.pid("rollout")
    os.kill(pid, signal.SIGKILL)
    ended = run.finished()
    assert re.search(
        rf"rollout-0 is lost and is started again: rollout-0 rank 0 .*, pid {pid}\): the process", ended.err
    )
    assert sum(row["rollout/restarts"] for row in run.metrics) == 1
    assert [row["step"] for row in run.metrics] == [*range(1, 61)]


# Rewards


@pytest.fixture(scope="module")
def troubles(house: Path):
    """Makes a file of four prompts, some with trouble; returns the overrides that train on it."""

    def make(*troubles: str) -> list[str]:
        rows = [{"prompt": f"s{n}{n}4310=", "trouble": "none"} for n in range(4)]
        for row, trouble in zip(rows, troubles, strict=False):
            row["trouble"] = trouble
        path = house / f"{'-'.join(troubles)}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [f"data.train={path}", "reward.function=rewards:troubled", "reward.timeout_seconds=1",
                "rollout.samples_per_prompt=2"]  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("trouble", "said", "launcher"),
    [
        ("hang", r"did not return within 1 s \(reward.timeout_seconds\)", "ray"),
        pytest.param("raise", r"raised ValueError: cannot judge s004310=", "inline", marks=pytest.mark.essential),
        ("die", r"took its process down", "inline"),
    ],
)
def test_a_reward_that_fails_ends_the_run_by_name(train: Start, troubles, trouble: str, said: str, launcher: str):
    run = train(*troubles(trouble), f"cluster.launcher={launcher}")
    message = assert_failed(run, run.finish(), steps=0)
    where = rf"role reward, method rewards:troubled, node {os.uname().nodename}: sample \d of 8 "
    assert re.match(where + said, message), message
    assert "prompt: 's004310='" in message
    assert "reward.on_error=zero" in message
    assert ("in troubled" in message) == (trouble == "raise")  # the function's own traceback, where it has one


def test_rewards_that_fail_may_count_as_zero(train: Start, troubles):
    run = train(*troubles("hang", "raise", "die"), "reward.on_error=zero", "reward.max_failures=0.8", "train.steps=2",
                "cluster.launcher=inline", "train.samples_every=1")  # fmt: skip
    ended = run.finished()
    assert [line["reward/failures"] for line in run.metrics] == [6, 6]  # three prompts of four, two samples each
    assert "reward failures 12 in 2 steps" in ended.out
    assert "such rows are scored 0" in ended.err.lower()
    assert re.search(r"sample \d of 8 ", (run.directory / "reward_error.txt").read_text())
    for step in (1, 2):
        rewards = [(row["prompt"], row["reward"]) for row in run.samples(step)]
        assert len(rewards) == 8
        assert all(reward == 0 for prompt, reward in rewards if prompt != "s334310=")
        assert any(reward > 0 for prompt, reward in rewards if prompt == "s334310=")


# Weights


@pytest.mark.parametrize(
    ("transport", "placement", "launcher", "what"),
    [
        ("corrupting_shared_memory", "separate", "ray", "changed"),
        ("dropping_shared_memory", "separate", "ray", "did not arrive"),
        ("corrupting_inproc", "colocated", "inline", "changed"),
    ],
)
def test_damaged_weights_stop_the_run_with_the_parameters_name(
    train, faulty_transports, transport, placement, launcher, what
):
    run = train(
        f"weights.transport={transport}", f"rollout.placement={placement}", f"cluster.launcher={launcher}",
        env=faulty_transports,
    )  # fmt: skip
    message = assert_failed(run, run.finish(), steps=1)  # whose update had ended, and is saved
    assert re.match(rf"weight update .*at rollout replica 0 .*{what}: model\.", message), message
    assert "model.norm.weight" in run.record["error"] or what == "did not arrive"
    assert "The old version keeps serving" in message
