"""`mismatch/*` on real engines: what an update reports of a rollout that serves what it says, and of one that does not.

What `enginehouse_rl.loop.trainer` does with these metrics in a run is in tests/integration/test_mismatch.py.
"""

import pytest

from enginehouse.controller import DistributedBatch
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec, Outputs, metric_values
from enginehouse_rl.steps.mismatch import add_measurement, mismatch

from .faults import StaleRolloutWorker
from .roles_for_tests import PROMPTS, dealt, open_house

SAMPLING = SamplingParams(n=4, max_tokens=6)
SUPERVISED = LossSpec("supervised")
SAME = 1e-4
"""Nats; two engines in float32 on the same weights are nearer than this."""


@pytest.fixture
def house():
    with open_house("inproc") as opened:
        yield opened


def test_an_update_measures_before_it_changes_a_weight_and_then_no_more(house):
    samples = house.rollout.generate(PROMPTS, SAMPLING, seed=1).drop(["finish_reason"])
    batch = dealt(2, epochs=2, batch=samples)
    first = batch["minibatch"][:, 0] == 0
    tokens = int(batch.take(first)["loss_mask"].values.sum())
    updated = house.actor.update(batch, SUPERVISED, 2, 2, add_measurement(SUPERVISED, 0))
    assert updated["mismatch/absolute_mean"].weight == tokens
    assert updated["mismatch/absolute_max"].value < SAME
    assert updated["loss"].weight == 2 * samples["loss_mask"].values.sum()
    changed = house.actor.update(batch, SUPERVISED, 2, 2, add_measurement(SUPERVISED, 0))
    assert changed["mismatch/absolute_mean"].value > 10 * SAME  # the samples are older than these weights


def test_both_ways_to_measure_see_the_same(house):
    sync = house.connect()
    house.train()
    sync.publish(1)
    samples = house.rollout.generate(PROMPTS, SAMPLING, seed=1).drop(["finish_reason"])
    house.train()
    scored = house.actor.forward(samples.select(["input_ids", "loss_mask"]), Outputs(), "old_")
    anew = metric_values(mismatch(DistributedBatch.of([samples]).joined(scored), 1))
    assert anew["mismatch/absolute_mean"] > 10 * SAME
    updated = metric_values(house.actor.update(samples, SUPERVISED, 1, 1, add_measurement(SUPERVISED, 1)))
    assert {name: updated[name] for name in anew} == pytest.approx(anew, rel=1e-3)


def test_a_replica_that_lies_about_its_version_is_seen_where_updates_are_not_checked():
    with open_house("inproc", rollout=StaleRolloutWorker) as house:
        sync = house.connect(effect_check_every=0)
        seen = []
        for version in (1, 2):
            sync.publish(version)
            samples = house.rollout.generate(PROMPTS, SAMPLING, seed=version).drop(["finish_reason"])
            lie = samples["weight_version"] * 0 + version
            samples = samples.with_columns(first_version=lie, weight_version=lie)
            seen.append(
                metric_values(house.actor.update(samples, SUPERVISED, 1, 1, add_measurement(SUPERVISED, version)))
            )
        assert seen[0]["mismatch/absolute_mean"] < SAME
        assert seen[1]["mismatch/absolute_mean"] > 100 * SAME
        assert seen[1]["mismatch/kl"] > 100 * seen[0]["mismatch/kl"]


def test_samples_of_a_replica_that_admits_to_older_weights_are_not_taken_for_the_engines_difference(house):
    sync = house.connect()
    sync.publish(1)
    samples = house.rollout.generate(PROMPTS, SAMPLING, seed=1).drop(["finish_reason"])
    house.train()
    metrics = house.actor.update(samples, SUPERVISED, 1, 1, add_measurement(SUPERVISED, 2))
    assert metric_values(metrics)["mismatch/compared"] == 0
