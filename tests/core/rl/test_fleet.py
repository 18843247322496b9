"""A fleet in this process: one replica, with the interface and the samples of a worker group."""

from __future__ import annotations

import pytest
import torch

from enginehouse.controller import RemoteError, WorkerGroup, WorkerSpec
from enginehouse.data import Batch, Ragged
from enginehouse.engines.model import ModelSpec
from enginehouse.engines.rollout import SamplingParams
from enginehouse.rl.fleet import RolloutFleet
from enginehouse.rl.roles import RolloutWorker, TrainWorker
from enginehouse.rl.sampling import drawn_by_group, in_order
from enginehouse.weights.sync import WeightSync
from enginehouse_testing.models import tiny_model

PROMPTS = Batch(
    {"prompt_ids": Ragged.from_list([[3, 4, 5], [6, 7], [8], [9, 10, 11, 12]]), "prompt_index": torch.arange(4)}
)
SAMPLING = SamplingParams(n=3, max_tokens=5)


@pytest.fixture(scope="module")
def spec():
    return WorkerSpec(RolloutWorker, "torch", ModelSpec(tiny_model()), {})


@pytest.fixture(scope="module")
def fleet(spec):
    opened = RolloutFleet(spec, 1, launcher="inline", samples_in_flight=4)
    assert opened.launch() == [opened.describe()[0]["engine"]]
    yield opened
    opened.shutdown()


def test_samples_have_the_rows_and_columns_of_a_worker_group(fleet, spec):
    with WorkerGroup(None, spec, name="rollout", launcher="inline") as group:
        group.launch()
        expected = group.generate(PROMPTS, SAMPLING, seed=4)
    drawn = fleet.generate(PROMPTS, SAMPLING, seed=4)
    assert set(drawn.columns) == set(expected.columns)
    assert torch.equal(drawn["input_ids"].values, expected["input_ids"].values)
    assert torch.equal(drawn["input_ids"].offsets, expected["input_ids"].offsets)
    assert drawn["seconds"].dtype == expected["seconds"].dtype
    assert drawn["seconds"].min() > 0


def test_what_is_handed_over_piece_by_piece_is_all_of_it(fleet, spec):
    sampling = SamplingParams(n=2, max_tokens=64)
    with WorkerGroup(None, spec, name="rollout", launcher="inline") as group:
        group.launch()
        expected = group.generate(PROMPTS, sampling, seed=4)
        for pieces in (
            list(fleet.generate_each(PROMPTS, sampling, seed=4)),
            list(drawn_by_group(group, PROMPTS, sampling, seed=4)),
        ):
            assert sorted(row for rows, _ in pieces for row in rows) == list(range(len(PROMPTS)))
            assert len(pieces) == len(PROMPTS)
            assert all(len(samples) == len(rows) * sampling.n for rows, samples in pieces)
            for name in ("input_ids", "loss_mask"):
                assert torch.equal(in_order(pieces)[name].values, expected[name].values)
                assert torch.equal(in_order(reversed(pieces))[name].offsets, expected[name].offsets)


def test_no_prompts_give_no_samples(fleet):
    assert len(fleet.generate(PROMPTS.slice(0, 0), SAMPLING, seed=4)) == 0
    assert list(fleet.generate_each(PROMPTS.slice(0, 0), SAMPLING, seed=4)) == []


def test_figures_are_told_once(fleet):
    fleet.metrics()
    fleet.generate(PROMPTS, SAMPLING, seed=4)
    figures = fleet.metrics()
    assert figures["rollout/replicas"] == 1
    assert figures["rollout/queued"] == 9  # a prompt of three samples at a time
    assert figures["rollout/busy_seconds"] > 0
    assert 0 < figures["rollout/utilisation"] <= 1
    assert fleet.metrics()["rollout/queued"] == 0


def test_weights_reach_it_and_an_error_of_its_worker_names_it(fleet, spec):
    train = WorkerSpec(TrainWorker, "torch", ModelSpec(tiny_model()), {"lr": 0.05})
    with WorkerGroup(None, train, name="actor", launcher="inline") as actor:
        sync = WeightSync(actor, fleet, "inproc", bucket_bytes=4096, timeout=30.0, probe=[[3, 4, 5]])
        sync.connect()
        assert sync.sync(1).effect < 1e-4
        assert set(fleet.generate(PROMPTS, SAMPLING, seed=4)["weight_version"].tolist()) == {1}
        sync.close()
    with pytest.raises(KeyError, match="prompt_ids"):
        fleet.generate(PROMPTS.drop(["prompt_ids"]), SAMPLING, seed=4)
    with pytest.raises(RemoteError, match=r"^rollout-0 rank 0 .*'generate' raised .*prompt_index"):
        fleet.generate(PROMPTS.drop(["prompt_index"]), SAMPLING, seed=4)
    assert fleet.states == ["serving"]
