"""The quickstart on two ranks of the `fsdp` backend: it learns, and fails clearly."""

import os
import re
import signal
from pathlib import Path

import pytest

from .conftest import SHORT, Start, assert_rose
from .run_process import RunFiles, RunProcess

pytestmark = pytest.mark.slow

FSDP = ("actor.engine.backend=fsdp", "actor.processes=2", "cluster.threads_per_process=1")
COLOCATED = (*FSDP, "rollout.replicas=2")


@pytest.mark.essential
def test_two_sharded_ranks_learn(start: Start, warmed_up: RunFiles):
    """With the rollout elsewhere one rank learns in test_vllm_quickstart.py, and two send in test_vllm_fleet.py."""
    run = start("train", *COLOCATED, *SHORT)
    assert_rose(run)
    assert run.pid("actor", 0) == run.pid("rollout", 0) != run.pid("actor", 1) == run.pid("rollout", 1)


# What fails on one rank while the other waits for it in a collective


def assert_failed(run: RunProcess, steps: int) -> str:
    """The run failed at once with one message, which is returned, and kept what it had."""
    ended = run.finish()
    assert ended.code == 1, ended.err
    saved, _, message = ended.err.partition("\nError: ")
    assert saved.startswith("The run failed. Saved: "), ended.err
    assert run.record["status"] == "failed"
    assert run.record["steps"] == len(run.metrics) == steps
    return message


def test_a_rank_killed_while_the_other_waits_for_it_is_named(train: Start, tmp_path: Path):
    run = train(
        *COLOCATED, "train.steps=1000000",
        "algorithm.loss.name=losses:stuck_at_rank_1", f"algorithm.loss.arguments={{call: 3, marks: {tmp_path}}}",
    )  # fmt: skip
    run.until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks in their third update")
    pid = run.pid("actor", 1)
    os.kill(pid, signal.SIGKILL)
    message = assert_failed(run, steps=2)
    assert re.match(rf"actor rank 1 \(node \S+, pid {pid}\): the process died during 'update'", message), message


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("raise_at_rank_1", r"'update' raised ArithmeticError: no gradient today"),
        (
            "out_of_memory_at_rank_1",
            r"'update' raised OutOfMemory: actor rank 1/2 on \S+: out of memory while computing the loss "
            r"'losses:out_of_memory_at_rank_1' of a micro-batch of \d+ tokens .*tokens_per_microbatch",
        ),
    ],
)
def test_a_rank_that_fails_while_the_other_waits_for_it_is_named(train: Start, loss: str, said: str):
    run = train(
        *COLOCATED, "train.steps=1000000", f"algorithm.loss.name=losses:{loss}", "algorithm.loss.arguments={call: 2}"
    )
    message = assert_failed(run, steps=1)
    assert re.match(rf"actor rank 1 \(node \S+, pid \d+\): {said}", message), message


def test_a_rank_that_never_comes_ends_the_run_within_its_deadline(train: Start, tmp_path: Path):
    run = train(
        *COLOCATED, "train.steps=1000000", "cluster.call_timeout_seconds=40",
        "algorithm.loss.name=losses:stuck_at_rank_1", f"algorithm.loss.arguments={{call: 2, marks: {tmp_path}}}",
    )  # fmt: skip
    message = assert_failed(run, steps=1)
    assert "made no progress for 40 s" in message
    assert "in stuck_at_rank_1" in message  # rank 1's stack shows where it is
