"""The quickstart with low-rank adapters on two sharded ranks, as its README says."""

import re
from pathlib import Path

import pytest

from .conftest import QUICKSTART, Start, installed
from .run_process import RunFiles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sources("plugins/fsdp/README.md", "plugins/fsdp/src/enginehouse_fsdp/adapters.py"),
]

DEATH = """
# Kills the only replica as it is asked for responses of version 3.
import os, signal
from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.0"
pids, switches = [], []

@hookimpl
def enginehouse_run_started(run):
    pids.append(run.roles.rollout.pids[0])

@hookimpl
def enginehouse_call_dispatched(group, method):
    if method == "commit_weights":
        switches.append(group)
    if method == "draw" and len(switches) == 3 and pids:
        os.kill(pids.pop(), signal.SIGKILL)
"""
STEPS = 60
RECIPE = (
    "actor.engine.backend=fsdp",
    "actor.processes=2",
    "rollout.replicas=2",
    "actor.engine.options.lr=3e-3",
    "actor.engine.options.lora="
    "{rank: 8, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]}",
)


def test_adapters_learn_the_quickstart(start: Start, warmed_up: RunFiles):
    readme = re.sub(r"\\\n *", "", (QUICKSTART / "README.md").read_text())
    assert all(override in readme for override in RECIPE)
    run = start(
        "train", *RECIPE, f"train.steps={STEPS}", "actor.engine.options.total_steps=250", "data.validation=null"
    )
    ended = run.finished()
    assert ended.err == ""
    rewards = [line["reward/mean"] for line in run.metrics]
    assert len(rewards) == STEPS
    assert sum(rewards[:5]) / 5 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.6, rewards


def test_the_base_of_the_adapters_is_the_reference_that_a_second_model_would_be(train: Start):
    short = (
        "reward.function=rewards:varied",
        "train.steps=3",
        "cluster.launcher=inline",
        "algorithm.kl.coefficient=0.01",
    )
    adapted = (*short, "actor.engine.backend=fsdp", "actor.engine.options={lr: 3.0e-3, lora: {rank: 4}}")
    runs = [train(*adapted), train(*adapted, "reference.path=examples/quickstart/work/model")]
    for run in runs:
        run.finished()
    base, copy = ([{name: line[name] for name in ("kl", "loss", "grad_norm")} for line in run.metrics] for run in runs)
    assert base == copy
    assert base[2]["kl"] > base[0]["kl"]
    assert ["reference" in run.record["roles"] for run in runs] == [False, True]


def test_an_update_of_the_adapter_alone_brings_what_merged_weights_bring(train: Start):
    short = (
        "reward.function=rewards:varied",
        "train.steps=3",
        "actor.engine.backend=fsdp",
        "actor.processes=2",
        "actor.engine.options={lr: 3.0e-3, lora: {rank: 4}}",
        "rollout.engine.backend=vllm",
        "rollout.engine.options.kv_cache_mib=64",
    )
    runs = [train(*short, f"weights.adapter={how}") for how in ("alone", "merged")]
    for run in runs:
        run.finished()
    alone, merged = ([line["weights/mib"] for line in run.metrics] for run in runs)
    assert alone[-1] < 0.3 * merged[-1]
    assert max(line["mismatch/absolute_mean"] for line in runs[0].metrics) <= 1e-4
    for lines in zip(*(run.metrics for run in runs), strict=True):
        first, second = ([line[name] for name in ("reward/mean", "grad_norm")] for line in lines)
        assert first == pytest.approx(second, rel=1e-3)


@pytest.mark.timeout(900)
def test_a_returned_replica_gets_the_served_adapter_from_all_ranks(train: Start, house: Path):
    run = train(
        "reward.function=rewards:varied",
        "train.steps=4",
        "actor.engine.backend=fsdp",
        "actor.processes=2",
        "actor.engine.options={lr: 3.0e-3, lora: {rank: 4}}",
        "rollout.engine.backend=vllm",
        "rollout.engine.options.kv_cache_mib=64",
        "weights.adapter=alone",
        "weights.transport=point_to_point",
        env={"PYTHONPATH": str(installed(house, "death_of_all", DEATH))},
    )
    run.finished(600)
    assert [line["rollout/restarts"] for line in run.metrics] == [0, 0, 1, 0]
    for line in run.metrics:
        assert line["mismatch/compared"] == 1
        assert line["mismatch/absolute_mean"] <= 1e-4
