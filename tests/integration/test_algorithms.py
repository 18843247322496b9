"""What the config can choose of an algorithm runs, and shows in the metrics that it ran."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .conftest import Start
from .run_process import RunProcess

pytestmark = pytest.mark.slow

VARIED = ("reward.function=rewards:varied", "train.steps=3", "cluster.launcher=inline")


def finished(run: RunProcess) -> list[dict[str, float]]:
    run.finished()
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    for line in run.metrics:
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
        assert line["grad_norm"] > 0
        assert line["skipped"] == 0
        assert 0 < line["entropy"] <= math.log(28), "measured whatever the loss"
    return run.metrics


@pytest.mark.fault(
    area="rewards",
    what="every sample of a group gets the same reward, such as 3.3",
    happens="its advantages are exactly 0, so it changes no weight",
    exit_code="0",
    kept="everything",
    noticed="in the metric `reward/groups_all_equal`",
)
def test_a_constant_reward_moves_no_weight(train: Start, house: Path):
    run = train("reward.function=rewards:constant", "rollout.samples_per_prompt=8", *VARIED[1:])
    run.finished()
    assert [line["reward/groups_all_equal"] for line in run.metrics] == [1.0, 1.0, 1.0]
    assert [(line["loss"], line["grad_norm"]) for line in run.metrics] == [(0.0, 0.0)] * 3
    before, after = (
        load_file(house / "examples/quickstart/work/model/model.safetensors"),
        load_file(run.directory / "model/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_kl_term_in_the_loss(train: Start):
    lines = finished(train(*VARIED, "algorithm.kl.coefficient=0.01"))
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)  # the actor still is the reference
    assert lines[-1]["kl"] > lines[0]["kl"]


def test_a_kl_term_in_the_reward_with_the_reference_in_the_actors_process(train: Start):
    run = train(*VARIED, "algorithm.kl={coefficient: 0.01, place: reward}", "cluster.launcher=ray",
                "rollout.placement=separate")  # fmt: skip
    lines = finished(run)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)  # the actor still is the reference
    assert abs(lines[-1]["kl"]) > 1e-4, "it no longer is; the mean of k1 over a few samples may have either sign"
    assert run.pid("reference") == run.pid("actor") != run.pid("rollout")


def test_minibatches_and_epochs_of_rloo_with_old_logprobs_of_the_actor_and_truncated_sampling(train: Start):
    lines = finished(
        train(
            *VARIED,
            "algorithm.advantage.name=rloo",
            "algorithm.old_logprobs=actor",
            "algorithm.minibatches=2",
            "algorithm.epochs=2",
            "rollout.sampling={max_tokens: 7, temperature: 0.8, top_p: 0.9, top_k: 5}",
            "actor.engine.options.schedule=constant",
        )
    )
    assert [line["optimizer_steps"] for line in lines] == [4, 4, 4]
    assert all(line["policy_kl"] > 0 for line in lines)  # the later minibatches are off their samples' policy


def test_an_advantage_of_ones_own_reads_any_column_of_numbers(train: Start):
    """`old_logprobs` too, where they are the rollout's own."""
    run = train(*VARIED, "algorithm.advantage.name=advantages:by_likelihood")
    assert finished(run)[0]["loss"] != 0


def test_an_entropy_bonus_with_asymmetric_and_dual_clipping(train: Start):
    arguments = "{clip_high: 0.28, dual_clip: 3.0, aggregation: sequence_mean_token_mean, entropy_coefficient: 0.01}"
    finished(train(*VARIED, f"algorithm.loss.arguments={arguments}"))


@pytest.mark.parametrize(
    ("advantage", "loss", "arguments", "figure"),
    [
        ("opo", "gspo", "{clip_low: 0.1, clip_high: 0.1}", "clip_fraction"),
        ("gpg", "policy_gradient", "{importance_cap: 1.0, importance_level: sequence}", "importance_capped"),
        ("reinforce_plus_plus_baseline", "cispo", "{importance_cap: 1.0, importance_mode: mask}", "importance_weight"),
        ("grpo", "sapo", "{tau_negative: 2.0}", "gate"),
    ],
)
def test_each_policy_loss_trains_and_reports(train: Start, advantage: str, loss: str, arguments: str, figure: str):
    lines = finished(
        train(
            *VARIED,
            f"algorithm.advantage.name={advantage}",
            f"algorithm.loss={{name: {loss}, arguments: {arguments}}}",
            "algorithm.old_logprobs=actor",
            "algorithm.minibatches=2",
        )
    )
    assert all(0 <= line[figure] <= 1 for line in lines)
    assert all(line["ratio"] > 0 for line in lines)


@pytest.mark.parametrize(
    "environment", [("cluster.launcher=inline",), ("environment.processes=1",)], ids=["here", "apart"]
)
def test_a_greedy_response_beside_each_prompts_is_what_remax_compares_with(train: Start, environment: tuple[str, ...]):
    run = train(*VARIED[:-1], "algorithm.advantage.name=remax", "train.samples_every=1", *environment)
    lines = finished(run)
    rows = (run.directory / "samples" / "step-000001.jsonl").read_text().splitlines()
    assert len(rows) == 16, "the greedy ones are not trained on"
    assert all(line["grad_norm"] > 0 for line in lines)


def test_responses_that_were_cut_are_not_trained_on(train: Start):
    task = (*VARIED, "rollout.sampling.max_tokens=3", "algorithm.mask_truncated=true")
    run = train(*task, "train.samples_every=1")
    run.finished()
    for step, line in enumerate(run.metrics, start=1):
        rows = (run.directory / "samples" / f"step-{step:06}.jsonl").read_text().splitlines()
        tokens = sum(row["tokens"] for row in map(json.loads, rows) if row["finish_reason"] == "stop")
        assert line["response/stopped"] < 1
        assert (line["skipped"] == 1) == (tokens == 0)
