"""Weights for an engine of its own for validations: what the rollout serves, verified, and nothing in its way.

With real torch engines in this process.
"""

import pytest

from enginehouse.controller import WorkerSpec
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.weights import WeightSyncError
from enginehouse.fleet.fleet import RolloutFleet
from enginehouse.fleet.generation import sort_samples
from enginehouse.roles.workers import RolloutWorker
from enginehouse_testing.models import tiny_model

from .roles_for_tests import PROMPTS, open_house

SAMPLING = SamplingParams(n=1, max_tokens=6)


@pytest.fixture(params=["inproc", "shared_memory"])
def house(request):
    with open_house(request.param) as opened:
        yield opened


@pytest.fixture
def evaluation():
    """An engine for validations, beside the rollout."""
    spec = WorkerSpec(RolloutWorker, "torch", ModelSpec(tiny_model()), {})
    fleet = RolloutFleet(spec, 1, name="evaluation", launcher="inline")
    fleet.launch()
    yield fleet
    fleet.shutdown()


def test_it_serves_what_the_rollout_serves_at_each_validation(house, evaluation):
    sync = house.connect()
    with pytest.raises(WeightSyncError, match="no version to bring to evaluation"):
        sync.serve_on(evaluation, "shared_memory")
    for version in (1, 2, 4):
        house.train()
        sync.publish(version)
        sync.serve_on(evaluation, "shared_memory")
        (theirs,), (ours,) = house.rollout.weight_state(), evaluation.weight_state()
        assert (ours.version, ours.checksums) == (version, theirs.checksums)
        drawn = sort_samples(evaluation.generate_each(PROMPTS, SAMPLING, seed=3))
        expected = house.rollout.generate(PROMPTS, SAMPLING, seed=3)
        assert drawn["input_ids"].values.tolist() == expected["input_ids"].values.tolist()
    house.train()
    sync.publish(5)
    assert house.versions() == [5]
    assert [state.version for state in evaluation.weight_state()] == [4]


def test_it_gets_nothing_once_the_trainer_has_gone_on(house, evaluation):
    sync = house.connect()
    sync.publish(1)
    house.train()
    with pytest.raises(WeightSyncError, match="the trainer, whose weights are not those of version 1 any more"):
        sync.serve_on(evaluation, "shared_memory")
    assert house.versions() == [1]
    assert [state.version for state in evaluation.weight_state()] == [0]
    sync.publish(2)
    sync.serve_on(evaluation, "shared_memory")
    assert house.versions() == [2]
    assert [state.version for state in evaluation.weight_state()] == [2]
