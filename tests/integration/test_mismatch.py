"""A run's metrics show how far the rollout's logprobs are from the actor's, and when a replica serves old weights.

The figures themselves are checked in tests/rl/steps/test_mismatch.py.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Start

pytestmark = pytest.mark.slow

VARIED = ("reward.function=rewards:varied", "cluster.launcher=inline", "actor.engine.options.schedule=constant")
SAME = 1e-4
"""Nats; two engines in float32 on the same weights are nearer than this."""


@pytest.fixture(scope="module")
def stale_rollout(house: Path) -> Mapping[str, str]:
    """Installs the plugin of `project/stale_rollout.py`; returns the environment in which it is found."""
    site = house / "stale-site"
    info = site / "stale_rollout-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale-rollout\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[enginehouse]\nstale-rollout = stale_rollout\n")
    shutil.move(house / "stale_rollout.py", site)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY / "tests" / "core")])}


@pytest.mark.parametrize(
    "how",
    [
        ("algorithm.old_logprobs=rollout", "algorithm.minibatches=2", "algorithm.epochs=2"),
        (
            "algorithm.old_logprobs=actor",
            "algorithm.loss.arguments.importance_cap=2.0",
            "rollout.sampling={max_tokens: 7, temperature: 0.7, top_p: 0.9}",
        ),
    ],
    ids=["from the update's forward pass", "from old_logprobs of the actor"],
)
def test_every_step_says_how_far_the_engines_are_apart(train: Start, how: tuple[str, ...]):
    run = train(*VARIED, "train.steps=3", *how)
    ended = run.finished()
    assert len(run.metrics) == 3
    assert "differ" not in ended.err
    for line in run.metrics:
        assert line["mismatch/compared"] == 1
        assert 0 < line["mismatch/absolute_mean"] <= line["mismatch/absolute_max"] < SAME
        assert line["mismatch/ratio"] == pytest.approx(1, abs=SAME)
        assert line["mismatch/outside"] == 0
        assert ("importance_weight" in line) == ("algorithm.old_logprobs=actor" in how)
        assert line.get("importance_weight", 1) == pytest.approx(1, abs=SAME)


def test_a_replica_that_lies_about_its_weights_shows_where_updates_are_not_checked(train, stale_rollout):
    run = train(
        *VARIED,
        "train.steps=2",
        "rollout.engine.backend=stale",
        "weights.effect_check_every=0",
        env=stale_rollout,
    )
    ended = run.finished()
    assert ended.err.count("the rollout's logprobs differ from the actor's by") == 1
    assert "step 2: the rollout's logprobs" in ended.err
    assert [json.loads(line)["alarm"] for line in (run.directory / "alarms.jsonl").open()] == ["engines_apart"]
    first, second = run.metrics
    assert first["mismatch/absolute_mean"] < SAME
    assert second["mismatch/compared"] == 1  # it claims to be of this version
    assert second["mismatch/absolute_mean"] > 100 * SAME
    assert second["mismatch/kl"] > first["mismatch/kl"]


@pytest.mark.fault(
    area="weights",
    what="the rollout engine ignores a weight update but reports its version, and cannot be read back",
    happens="the run ends, because the replica's log-probabilities did not change as the trainer's did",
    exit_code="1",
    kept="as after any failed run",
    noticed="at that update, also at a learning rate of 1e-6",
)
@pytest.mark.parametrize("backend", [pytest.param("dropping", marks=pytest.mark.essential), "dropping-once"])
def test_a_dropped_update_ends_the_run_at_once(train: Start, stale_rollout: Mapping[str, str], backend: str):
    run = train(
        *VARIED,
        "train.steps=9",
        f"rollout.engine.backend={backend}",
        "actor.engine.options.lr=1e-6",
        env=stale_rollout,
    )
    ended = run.finish()
    assert ended.code == 1
    assert "says that it serves version 2, but computes as before" in ended.err
    # The update after the first step is the first that changes weights. That step is saved, its samples were not stale.
    assert [row["step"] for row in run.metrics] == [1]


def test_an_engine_that_declares_nothing_serves_a_run(train: Start, stale_rollout: Mapping[str, str]):
    # With staleness, updates come while the engine generates: most would have it hold its requests.
    ahead = ("train.staleness=1", "rollout.placement=separate", "cluster.launcher=ray")
    train("train.steps=3", "rollout.engine.backend=unpromising", *ahead, env=stale_rollout).finished()
