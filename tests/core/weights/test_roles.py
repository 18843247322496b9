"""The two kinds of worker, with real torch engines in this process."""

import pytest
import torch

from enginehouse.controller import RemoteError, WorkerGroup, WorkerSpec
from enginehouse.data import Batch
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import SamplingParams
from enginehouse.engines.train import LossSpec, Mean, Outputs
from enginehouse.errors import EnginehouseError
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse_testing.models import tiny_model
from enginehouse_torch.options import TorchTrainOptions
from enginehouse_torch.train import TorchTrainEngine

from .faults import UnpromisingRolloutWorker
from .roles_for_tests import DEMONSTRATIONS, PROMPTS, dealt, logprobs, open_house

SUPERVISED = LossSpec("supervised")


@pytest.fixture
def house():
    with open_house("inproc") as opened:
        yield opened


def test_an_update_is_one_forward_backward_and_one_optimizer_step(house):
    engine = TorchTrainEngine()
    engine.setup(ModelSpec(tiny_model()), TorchTrainOptions(lr=0.05), ProcessContext("oracle"))
    loss = engine.forward_backward(DEMONSTRATIONS, SUPERVISED)["loss"]
    step = engine.optim_step()
    updated = house.actor.update(DEMONSTRATIONS, SUPERVISED)
    assert isinstance(loss, Mean)
    assert updated["loss"].value == pytest.approx(loss.value)
    assert updated["grad_norm"] == pytest.approx(step["grad_norm"])
    assert updated["optimizer_steps"] == 1
    assert updated["busy/update"].value > 0
    expected = engine.forward(DEMONSTRATIONS.select(["input_ids"]), Outputs())["logprobs"].values
    assert torch.allclose(logprobs(house.actor), expected, atol=1e-6)


def test_minibatches_and_epochs_take_as_many_steps_even_with_fewer_rows(house):
    updated = house.actor.update(dealt(3, epochs=2), SUPERVISED, minibatches=3, epochs=2)
    assert updated["optimizer_steps"] == 6
    assert updated["loss"].weight == 2 * DEMONSTRATIONS["loss_mask"].values.sum().item()
    more = len(DEMONSTRATIONS) + 3
    assert house.actor.update(dealt(more), SUPERVISED, minibatches=more)["optimizer_steps"] == more


def test_the_deal_decides_which_rows_a_minibatch_has(house):
    start = house.actor
    outcomes = []
    for seed in (0, 0, 1):
        with open_house("inproc") as fresh:
            fresh.actor.update(dealt(4, seed=seed), SUPERVISED, minibatches=4)
            outcomes.append(logprobs(fresh.actor))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])
    assert not torch.equal(outcomes[0], logprobs(start))


def test_samples_do_not_depend_on_who_draws_which_rows(house):
    sampling = SamplingParams(n=3, max_tokens=6)
    whole = house.rollout.generate(PROMPTS, sampling, seed=5)
    parts = [house.rollout.generate(PROMPTS.take(rows), sampling, seed=5) for rows in ([4], [2, 3], [0, 1])]
    joined = Batch.concat(parts[::-1])
    assert torch.equal(whole["input_ids"].values, joined["input_ids"].values)
    assert len(whole) == 3 * len(PROMPTS)
    other = house.rollout.generate(PROMPTS, sampling, seed=6)
    assert other["input_ids"].values.tolist() != whole["input_ids"].values.tolist()
    assert len({tuple(whole["input_ids"][row].tolist()) for row in range(3)}) > 1  # samples of a row differ


def test_the_rollouts_logprobs_are_the_trainers(house):
    samples = house.rollout.generate(PROMPTS, SamplingParams(n=2, max_tokens=6, temperature=0.7), seed=1)
    expected = house.actor.forward(samples.select(["input_ids"]), Outputs(temperature=0.7))["logprobs"].values
    mask = samples["loss_mask"].values
    assert torch.allclose(samples["rollout_logprobs"].values[mask], expected[mask], atol=2e-4)
    assert not samples["rollout_logprobs"].values[~mask].any()
    assert (samples["seconds"] > 0).all()


def test_an_engine_that_declares_nothing_is_asked_for_nothing():
    with open_house("inproc", rollout=UnpromisingRolloutWorker) as house:
        sync = house.connect(probe=None)
        for version in (1, 2):
            sync.publish(version)
            samples = house.rollout.generate(PROMPTS, SamplingParams(n=2, max_tokens=6), seed=5)
            assert len(samples) == 2 * len(PROMPTS)
            house.train()


def test_a_share_without_rows_gives_no_samples(house):
    samples = house.rollout.generate(PROMPTS.slice(0, 0), SamplingParams(), seed=0)
    assert len(samples) == 0
    assert set(samples.columns) == set(house.rollout.generate(PROMPTS, SamplingParams(), seed=0).columns)


def test_a_seed_without_row_numbers_is_refused(house):
    with pytest.raises(EnginehouseError, match="prompt_index"):
        house.rollout.generate(PROMPTS.select(["prompt_ids"]), SamplingParams(), seed=0)


def test_a_rollout_that_was_not_launched_says_so():
    spec = WorkerSpec(RolloutWorker, "torch", ModelSpec(tiny_model()))
    with (
        WorkerGroup(None, spec, launcher="inline") as group,
        pytest.raises(EnginehouseError, match="before it was launched"),
    ):
        group.generate(PROMPTS, SamplingParams())


def test_a_saved_model_comes_back(house, tmp_path):
    before = logprobs(house.actor)
    house.actor.save(str(tmp_path / "checkpoint"))
    house.train()
    assert not torch.equal(logprobs(house.actor), before)
    house.actor.load(str(tmp_path / "checkpoint"))
    assert torch.equal(logprobs(house.actor), before)
    house.actor.export_hf(str(tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("call", "capability"),
    [
        (("save_in_background", "somewhere"), "background_save"),
        (("finish_save",), "background_save"),
        (("export_adapter", "somewhere"), "lora"),
        (("forward_base", PROMPTS, Outputs()), "lora"),
    ],
)
def test_what_a_backend_does_not_declare_is_refused(house, call, capability):
    method, *arguments = call
    with pytest.raises(EnginehouseError, match=f"'torch' does not declare '{capability}'"):
        getattr(house.actor, method)(*arguments)


def test_workers_describe_what_runs_in_them(house):
    for group, backend in ((house.actor, "torch"), (house.rollout, "torch")):
        said = group.describe()[0]
        assert said["backend"] == backend
        assert {"rank", "node", "pid", "engine", "python", "torch", "device"} <= set(said)


def test_an_unknown_backend_is_an_error_with_the_choices():
    with pytest.raises(RemoteError, match=r"raised PluginLookupError: .*torch"):
        WorkerGroup(None, WorkerSpec(TrainWorker, "torhc", ModelSpec(tiny_model())), launcher="inline")


def test_health_pause_and_resume_reach_the_engine(house):
    house.rollout.pause("wait")
    assert house.rollout.health()[0].paused
    house.rollout.resume()
    assert not house.rollout.health()[0].paused
    assert len(house.rollout.generate(PROMPTS, SamplingParams())) == len(PROMPTS)
