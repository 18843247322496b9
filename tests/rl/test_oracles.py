"""Advantages, losses and KL estimators against verl and TRL, on what their own code computed (`oracles/make.py`).

Theirs is float64, ours as well for losses; our advantages are float32. All agree to 1e-6.
"""

import json
from pathlib import Path

import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import TokenView
from enginehouse.plugin import load_plugins, resolve
from enginehouse.roles.workers import fill_defaults
from enginehouse_rl.losses.aggregate import AGGREGATIONS
from enginehouse_rl.losses.kl import token_kl

WRITTEN = json.loads((Path(__file__).parent / "oracles" / "cases.json").read_text(encoding="utf-8"))
CASES = WRITTEN["cases"]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def of_kind(kind):
    cases = [case for case in CASES if case["kind"] == kind]

    def label(case):
        arguments = "-".join(f"{key}={value}" for key, value in case["arguments"].items())
        return f"{case['name']}-{case['theirs'].partition('.')[0]}-{arguments}"

    return pytest.mark.parametrize("case", cases, ids=label)


def ours(kind, name):
    return resolve(load_plugins(enabled=[]).get(kind, name).function)


def make_batch(name, changed=None):
    """Their padded batch as ours: rows cut to their length, and a prompt before each, of numbers that mean nothing."""
    padded = WRITTEN["batches"][name] | (changed or {})
    lengths, result = padded["length"], {}
    for key, values in padded.items():
        if not isinstance(values[0], list) or key == "rewards":
            result[key] = torch.tensor(values)
            continue
        kept = [torch.tensor(row[:length], dtype=torch.float64) for row, length in zip(values, lengths, strict=True)]
        nothing = [torch.full((1 + row % 2,), 0.0 if key == "mask" else -7.0).double() for row in range(len(kept))]
        result[key] = Ragged.from_list([torch.cat(pair) for pair in zip(nothing, kept, strict=True)])
    result["loss_mask"] = result["mask"].like(result["mask"].values.bool())
    result["response_tokens"] = torch.tensor([int(row.sum()) for row in result["loss_mask"]])
    return Batch(result)


def by_token_columns(batch):
    return {name: batch[name].values for name in batch.columns if isinstance(batch[name], Ragged)}


def by_token(theirs, batch):
    """Numbers of theirs, padded, at the tokens that our mask counts."""
    prompts = [1 + row % 2 for row in range(len(batch))]
    rows = zip(theirs, batch["loss_mask"], prompts, strict=True)
    return torch.cat([torch.tensor(row, dtype=torch.float64)[: len(m) - n][m[n:]] for row, m, n in rows])


@of_kind("advantage")
def test_an_advantage_is_theirs(case):
    batch = make_batch(case["batch"])
    made = fill_defaults(ours("advantage", case["name"])(batch, **case["arguments"]))
    mask = batch["loss_mask"].values
    for column in {"advantages", "returns"} & case.keys():
        found = made[column].values
        torch.testing.assert_close(found[mask].double(), by_token(case[column], batch), **CLOSE)
        assert not found[~mask].any()


def make_view(case):
    changed = {}
    if case.get("by_row"):
        rows = WRITTEN["batches"]["turns"]
        changed["advantages"] = [[one] * len(rows["mask"][0]) for one in rows["row_advantages"]]
    batch = make_batch(case["batch"], changed)
    columns = by_token_columns(batch)
    values = {"logprobs": columns.pop("logprobs"), "entropy": columns.pop("entropy"), "values": columns["new_values"]}
    outputs = {name: one.clone().requires_grad_() for name, one in values.items()}
    return TokenView(outputs, columns, batch["loss_mask"].row, len(batch)), batch


@of_kind("loss")
def test_a_loss_and_its_gradient_are_theirs(case):
    view, batch = make_view(case)
    value = ours("loss", case["name"])(view, **case["arguments"])
    assert value.total.item() / value.weight == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)
    leaf = view.outputs["values" if case["name"] == "clipped_value" else "logprobs"]
    (gradient,) = torch.autograd.grad(value.total / value.weight, leaf)
    mask = batch["loss_mask"].values
    torch.testing.assert_close(gradient[mask], by_token(case["gradient"], batch), **CLOSE)
    assert not gradient[~mask].any()
    if "clip_fraction" in case:
        assert value.metrics["clip_fraction"].value == pytest.approx(case["clip_fraction"], abs=1e-6)


def test_every_aggregation_has_numbers_of_theirs():
    assert {case["arguments"].get("aggregation") for case in CASES} >= set(AGGREGATIONS)


@of_kind("kl")
def test_a_kl_estimator_and_its_gradient_are_theirs(case):
    view, batch = make_view(case)
    logprobs = view.outputs["logprobs"]
    divergence = token_kl(logprobs, view.columns["reference_logprobs"], case["name"])
    (gradient,) = torch.autograd.grad(divergence.sum(), logprobs)
    mask = batch["loss_mask"].values
    torch.testing.assert_close(divergence[mask].detach(), by_token(case["divergence"], batch), **CLOSE)
    torch.testing.assert_close(gradient[mask], by_token(case["gradient"], batch), **CLOSE)


@of_kind("advantage and loss")
def test_distillation_by_the_policy_gradient_is_theirs(case):
    batch = make_batch("turns", {"logprobs": case["logprobs"]}).drop(["old_logprobs"])
    made = ours("advantage", "distillation")(fill_defaults(batch))  # the rollout's are the old ones, as theirs
    columns = by_token_columns(made)
    logprobs = columns["logprobs"].requires_grad_()
    view = TokenView({"logprobs": logprobs}, columns, batch["loss_mask"].row, len(batch))
    value = ours("loss", "policy_gradient")(view)
    assert value.total.item() / value.weight == pytest.approx(case["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(value.total / value.weight, logprobs)
    torch.testing.assert_close(gradient[batch["loss_mask"].values], by_token(case["gradient"], batch), **CLOSE)
