"""How a version is switched to, and the way back if its load fails. The engine's load is a fake that fails as told."""

import asyncio

import pytest
import torch

from enginehouse.engines.model import ModelSpec
from enginehouse.engines.weights import ParamMeta, WeightChunk, WeightSyncError, WeightUpdate
from enginehouse.weights.staging import StagedWeights, WeightsLost
from enginehouse_testing.models import tiny_model


class Engine:
    """Loads versions, and fails in the steps of `failing`, which are numbered from 0."""

    def __init__(self):
        self.weights = StagedWeights(ModelSpec(tiny_model()), "replica 0")
        self.weights.learn()
        self.steps = []
        self.failing = set()

    def stage(self, number):
        shapes = self.weights.parameters
        metas = [ParamMeta(name, dtype, shape) for name, (shape, dtype) in shapes.items()]
        self.weights.start(WeightUpdate(number, metas))
        tensors = [(meta.name, torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))) for meta in metas]
        self.weights.stage(WeightChunk(tensors))

    async def begin(self):
        self._step("begin")

    async def load(self, number, version):
        assert self.weights.source_of(version).keys() == ({"directory"} if version is None else {"parameters"})
        assert version is None or version.number == number
        self._step(number)

    def _step(self, what):
        self.steps.append(what)
        if len(self.steps) - 1 in self.failing:
            raise WeightSyncError(f"step {len(self.steps) - 1} failed", ["a.parameter"])

    def serve(self, number, *failing):
        """Stage and serve a version, and note the steps."""
        self.stage(number)
        self.steps, self.failing = [], set(failing)
        asyncio.run(self.weights.serve(number, self.load, self.begin))


@pytest.fixture
def engine():
    return Engine()


@pytest.mark.parametrize("served", [0, 1])
def test_the_served_version_is_loaded_again_if_a_load_fails(engine, served):
    if served:
        engine.serve(1)
    with pytest.raises(WeightSyncError, match=f"^step 1 failed; version {served} is served again") as caught:
        engine.serve(2, 1)
    assert not isinstance(caught.value, WeightsLost)
    assert caught.value.parameters == ("a.parameter",)
    assert engine.steps == ["begin", 2, "begin", served]
    assert engine.weights.version == served
    engine.weights.check()
    engine.serve(3)
    assert engine.steps == ["begin", 3]
    assert engine.weights.version == 3


def test_a_load_that_does_not_begin_changes_nothing(engine):
    with pytest.raises(WeightSyncError, match=r"^step 0 failed; version 0 is served again"):
        engine.serve(1, 0)
    assert engine.steps == ["begin"]
    engine.weights.check()


@pytest.mark.parametrize("failing", [2, 3])
def test_a_replica_that_has_no_complete_model_says_so(engine, failing):
    with pytest.raises(WeightsLost, match=rf"^step 1 failed\. Version 0 could not be .* step {failing} failed"):
        engine.serve(1, 1, failing)
    with pytest.raises(WeightsLost, match="start it again"):
        engine.weights.check()
    with pytest.raises(WeightsLost, match="start it again"):
        engine.serve(2)
    assert engine.steps == []
