"""`mismatch/*`: the figures by hand, whoever computes them, and what they count."""

import itertools
import math

import numpy as np
import pytest
import torch

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import LossSpec, LossValue, Max, Mean, Outputs, TokenView, merge_metrics, metric_values
from enginehouse.plugin import plugins
from enginehouse_rl.steps.mismatch import add_measurement, mismatch

VERSION = 7
LENGTHS = (4, 6, 3, 5)
VERSIONS = (VERSION, VERSION, 6, VERSION)

Step = tuple[Batch, Ragged]


@pytest.fixture
def step() -> Step:
    """Samples, of which row 2 is of an older version, and the actor's logprobs; some tokens differ a lot."""
    generator = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    ids = Ragged.from_lengths(torch.arange(tokens), torch.tensor(LENGTHS))
    first = torch.tensor([0, *itertools.accumulate(LENGTHS[:-1])])
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[first] = mask[first + 1] = False
    rollout = -3 * torch.rand(tokens, generator=generator)
    samples = Batch(
        {
            "input_ids": ids,
            "loss_mask": ids.like(mask),
            "rollout_logprobs": ids.like(torch.where(mask, rollout, 0)),
            "first_version": torch.tensor(VERSIONS),
            "weight_version": torch.tensor(VERSIONS),
        }
    )
    return samples, ids.like(rollout + 0.8 * torch.randn(tokens, generator=generator))


def by_hand(step: Step, rows=(0, 1, 2, 3)) -> dict[str, float]:
    """The figures from their definitions, token by token."""
    samples, logprobs = step
    differences, sequences, looked_at = [], [], 0
    for row in rows:
        counted = samples["loss_mask"][row].numpy()
        looked_at += counted.sum()
        if VERSIONS[row] != VERSION:
            continue
        of_row = (logprobs[row].numpy() - samples["rollout_logprobs"][row].numpy())[counted].astype(np.float64)
        differences.extend(of_row)
        sequences.append(np.exp(of_row.sum()))
    d = np.array(differences)
    return {
        "mismatch/compared": len(d) / looked_at,
        "mismatch/absolute_mean": np.abs(d).mean(),
        "mismatch/absolute_max": np.abs(d).max(),
        "mismatch/kl": np.mean(np.exp(d) - 1 - d),
        "mismatch/ratio": np.exp(d).mean(),
        "mismatch/outside": np.mean(~(np.abs(d) <= math.log(2))),
        "mismatch/sequence_ratio": np.mean(sequences),
    }


def view_of(step: Step, rows: list[int]) -> TokenView:
    """What a loss sees of some rows, as an engine would give it."""
    samples, logprobs = step
    part = samples.with_columns(logprobs=logprobs).take(rows)
    columns = {name: part[name].values for name in ("loss_mask", "rollout_logprobs")}
    columns |= {name: part[name] for name in ("first_version", "weight_version")}
    outputs = {"logprobs": part["logprobs"].values.clone().requires_grad_()}
    return TokenView(outputs, columns, part["loss_mask"].row, len(rows))


def measure(step: Step, rows: list[int]) -> LossValue:
    """The supervised loss over some rows, measuring, called as an engine calls a loss."""
    spec = add_measurement(LossSpec("supervised", {"aggregation": "token_mean"}), VERSION)
    return plugins().function("loss", spec.name)(view_of(step, rows), **spec.arguments)


def compare(samples: Batch, logprobs: Ragged, version: int = VERSION) -> dict[str, Mean | Max]:
    """As of a step whose rows lie in two places, and the actor's logprobs in two others."""
    parts = DistributedBatch.of(samples.split([1, 3]))
    return mismatch(parts.joined(DistributedBatch.of(Batch({"old_logprobs": logprobs}).split([2, 2]))), version)


def of_the_served(found: dict[str, float]) -> dict[str, float]:
    """Without the figures of rows of older weights."""
    return {name: value for name, value in found.items() if "behind" not in name}


def test_the_figures_are_those_of_the_formulas(step):
    found = of_the_served(metric_values(compare(*step)))
    expected = by_hand(step)
    assert 0 < expected["mismatch/outside"] < 1
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 1], [2], [], [0]]], ids=str)
def test_the_loss_of_the_first_step_reports_the_same_however_the_batch_is_cut(step, cut):
    found = metric_values(merge_metrics(measure(step, rows).metrics for rows in cut))
    assert found == pytest.approx(by_hand(step), rel=1e-6)


def test_measuring_changes_neither_the_loss_nor_its_gradient_nor_its_figures_nor_what_it_is_given(step):
    loss = LossSpec("clipped_policy", {"clip_low": 0.01}, Outputs(entropy=True, temperature=0.5))
    measured = add_measurement(loss, VERSION)
    assert measured.outputs == loss.outputs
    found = []
    for spec in (loss, measured):
        view = view_of(step, [0, 1, 2, 3])
        view.columns.update(advantages=torch.linspace(-1, 1, sum(LENGTHS)), old_logprobs=-torch.ones(sum(LENGTHS)))
        value = plugins().function("loss", spec.name)(view, **spec.arguments)
        value.total.backward()
        found.append((value, view.outputs["logprobs"].grad))
    (bare, gradient), (value, same) = found
    assert torch.equal(gradient, same)
    assert (value.total.item(), value.weight) == (bare.total.item(), bare.weight)
    assert bare.metrics.items() <= value.metrics.items()


def test_the_entropy_is_measured_whatever_the_loss(step):
    spec = add_measurement(LossSpec("supervised"), VERSION)
    assert (spec.outputs.entropy, spec.outputs.entropy_gradient) == (True, False)
    view = view_of(step, [0, 1, 2, 3])
    entropy = torch.linspace(0.0, 1.0, sum(LENGTHS))
    view.outputs["entropy"] = entropy
    value = plugins().function("loss", spec.name)(view, **spec.arguments)
    mask = step[0]["loss_mask"].values
    assert value.metrics["entropy"].value == pytest.approx(entropy[mask].mean().item())


def test_samples_of_another_version_are_not_compared(step):
    samples, logprobs = step
    worse = logprobs.values.clone()
    worse[samples["loss_mask"].row == 2] += 5
    found = of_the_served(metric_values(compare(samples, logprobs.like(worse))))
    assert found == pytest.approx(by_hand(step), rel=1e-6)


def test_samples_of_older_weights_are_measured_apart_by_their_age(step):
    samples, logprobs = step
    found = metric_values(compare(samples, logprobs))
    counted = samples["loss_mask"][2]
    d = (logprobs[2] - samples["rollout_logprobs"][2])[counted].double()
    assert {name: value for name, value in found.items() if "behind" in name} == pytest.approx(
        {
            "mismatch/behind_1/kl": (d.exp() - 1 - d).mean().item(),
            "mismatch/behind_1/ratio": d.exp().mean().item(),
            "mismatch/behind_1/sequence_ratio": d.sum().exp().item(),
        },
        rel=1e-6,
    )


def test_a_row_of_two_versions_counts_by_its_oldest_token(step):
    samples, logprobs = step
    mixed = samples.with_columns(first_version=torch.tensor([VERSION, VERSION - 2, 6, VERSION]))
    found = metric_values(compare(mixed, logprobs))
    assert {name.split("/")[1] for name in found if "behind" in name} == {"behind_1", "behind_2"}
    assert found["mismatch/compared"] < by_hand(step)["mismatch/compared"]


def test_a_row_without_a_token_of_the_policys_is_of_no_age(step):
    """As of an episode that failed, masked: it has no version."""
    samples, logprobs = step
    mask = samples["loss_mask"]
    masked = samples.with_columns(
        loss_mask=mask.like(mask.values & (mask.row != 3)),
        first_version=torch.tensor([*VERSIONS[:3], -1]),
        weight_version=torch.tensor([*VERSIONS[:3], -1]),
    )
    found = metric_values(compare(masked, logprobs))
    assert {name.split("/")[1] for name in found if "behind" in name} == {"behind_1"}
    assert of_the_served(found) == pytest.approx(by_hand(step, (0, 1, 2)), rel=1e-6)
    assert metric_values(measure((masked, logprobs), [0, 1, 2, 3]).metrics) == pytest.approx(of_the_served(found))


def test_where_nothing_can_be_compared_no_figure_is_made_up(step):
    samples, logprobs = step
    assert of_the_served(metric_values(compare(samples, logprobs, VERSION + 1))) == {"mismatch/compared": 0.0}
    assert metric_values(measure(step, [2]).metrics) == {"mismatch/compared": 0.0}
    assert metric_values(merge_metrics([measure(step, [2]).metrics, measure(step, [0]).metrics]))[
        "mismatch/absolute_mean"
    ] == pytest.approx(by_hand(step, [0])["mismatch/absolute_mean"])


def test_a_logprob_that_is_not_a_number_is_seen_whichever_rank_has_it(step):
    samples, logprobs = step
    broken = logprobs.values.clone()
    broken[-1] = math.nan  # of the last row
    step = samples, logprobs.like(broken)
    parts = [measure(step, [row]).metrics for row in (0, 1, 3)]
    for order in itertools.permutations(parts):
        found = metric_values(merge_metrics(order))
        assert math.isnan(found["mismatch/absolute_max"])
        assert math.isnan(found["mismatch/absolute_mean"])
        assert found["mismatch/outside"] == pytest.approx(by_hand(step, (0, 1, 3))["mismatch/outside"])


def test_a_maximum_is_that_of_all_parts_in_any_order():
    for order in itertools.permutations([1.0, 3.0, 2.0]):
        merged = merge_metrics({"largest": Max(value), "mean": Mean(value, 1.0)} for value in order)
        assert metric_values(merged) == {"largest": 3.0, "mean": 2.0}
