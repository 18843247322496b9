"""The learning rate over the steps of a run, and clipping."""

import math
import re

import pytest
import torch
from pydantic import ValidationError
from torch_train_cases import POLICY, make_batch, make_engine, oracle_policy_loss, plain_model, weights_of

from enginehouse.errors import ConfigError
from enginehouse_testing.models import tiny_model
from enginehouse_torch.modeling.schedule import learning_rate
from enginehouse_torch.options import TorchTrainOptions


def _rates(steps, **options):
    return [learning_rate(step, TorchTrainOptions(lr=1.0, **options)) for step in range(steps)]


def test_warm_up_rises_in_equal_parts_to_the_full_rate():
    assert _rates(5, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_decay_ends_at_its_least_rate_and_stays():
    assert _rates(8, warmup_steps=2, schedule="linear", total_steps=6, min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_decay_is_half_way_down_in_the_middle():
    rates = _rates(9, schedule="cosine", total_steps=8)
    assert rates[0] == 1.0
    assert rates[2] == pytest.approx(0.8536, abs=1e-4)  # slow at first, unlike the linear one
    assert rates[4] == pytest.approx(0.5)
    assert rates[6] == pytest.approx(0.1464, abs=1e-4)
    assert rates[8] == pytest.approx(0.0)


def test_a_warm_up_longer_than_the_run_works():
    assert _rates(4, warmup_steps=4, schedule="linear", total_steps=2) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_decay_needs_an_end():
    with pytest.raises(ConfigError, match="total_steps"):
        _rates(1, schedule="linear")


def test_each_step_reports_the_rate_it_used():
    engine = make_engine(tiny_model(), lr=1e-3, warmup_steps=2, schedule="linear", total_steps=4)
    rates = []
    for _ in range(4):
        engine.forward_backward(make_batch(2, 2), POLICY)
        rates.append(engine.optim_step()["lr"])
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_a_large_gradient_is_scaled_down_to_the_limit():
    batch = make_batch(3, 2)
    moved = {}
    for limit in (1e-3, 2e-3):
        # A large eps makes AdamW's first step proportional to the gradient.
        engine = make_engine(tiny_model(), lr=1.0, eps=1e3, max_grad_norm=limit)
        before = [weight.clone() for _, weight in engine.weight_source().iter_full()]
        engine.forward_backward(batch, POLICY)
        assert engine.optim_step()["grad_norm"] > 0.1
        after = [weight for _, weight in engine.weight_source().iter_full()]
        moved[limit] = torch.stack([(a - b).double().norm() for a, b in zip(after, before, strict=True)]).norm().item()
    assert moved[2e-3] == pytest.approx(2 * moved[1e-3], rel=0.05)


GROUPS = {"*.embed_tokens.*": 0.0, "model.layers.0.*": 0.25, "*.norm*": 4.0, "*.layers.0.mlp.*": 9.0}
"""The last is not reached: all that it matches, the second does."""


def _factor(name):
    return 0.0 if "embed_tokens" in name else 0.25 if ".layers.0." in name else 4.0 if ".norm" in name else 1.0


def test_groups_of_parameters_have_learning_rates_of_their_own():
    path, batch = tiny_model("qwen3", tied=False), make_batch(4, 4)
    engine = make_engine(path, lr=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=1e9, lr_groups=GROUPS)
    model = plain_model(path)
    groups = [{"params": [p], "lr": 1e-2 * _factor(name)} for name, p in model.named_parameters()]
    adamw = torch.optim.AdamW(groups, weight_decay=0.1, eps=1e-3)
    for _ in range(3):
        engine.forward_backward(batch, POLICY)
        assert engine.optim_step()["lr"] == 1e-2
        oracle_policy_loss(model, batch).backward()
        adamw.step()
        adamw.zero_grad()
    before, oracle = weights_of(make_engine(path)), dict(model.named_parameters())
    found = weights_of(engine)
    assert torch.equal(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for name, weight in found.items():
        torch.testing.assert_close(weight, oracle[name].detach(), atol=1e-5, rtol=0)


def test_a_parameter_that_stays_as_it_is_does_not_decide_how_others_are_clipped():
    path, batch = tiny_model("qwen3", tied=False), make_batch(4, 4)
    engine = make_engine(path, lr=1e-2, max_grad_norm=1e-3, lr_groups={"*.embed_tokens.*": 0.0})
    model = plain_model(path)
    oracle_policy_loss(model, batch).backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    fixed = norms.pop("model.embed_tokens.weight")
    assert fixed > 0
    engine.forward_backward(batch, POLICY)
    assert engine.optim_step()["grad_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-4)


def test_training_with_groups_goes_on_from_a_checkpoint_without_them_and_back(tmp_path):
    path, batch = tiny_model("qwen3", tied=False), make_batch(4, 4)

    def trained(engine):
        for _ in range(2):
            engine.forward_backward(batch, POLICY)
            engine.optim_step()
        return engine

    trained(make_engine(path, lr=1e-2)).save(str(tmp_path / "plain"))
    grouped = make_engine(path, lr=1e-2, lr_groups={"*.norm*": 1.0, "*.mlp.*": 1.0, "*": 1.0 + 1e-12})
    grouped.load(str(tmp_path / "plain"))
    grouped.save(str(tmp_path / "grouped"))
    straight = make_engine(path, lr=1e-2)
    straight.load(str(tmp_path / "grouped"))
    there, here = weights_of(trained(grouped)), weights_of(trained(straight))
    for name, weight in there.items():
        torch.testing.assert_close(weight, here[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("pattern", ["model.layers.7.*", "lm_head.*", "norm"])
def test_a_pattern_that_no_parameter_matches_is_an_error_at_the_start(pattern):
    with pytest.raises(
        ConfigError, match=rf"lr_groups: no trained parameter matches '{re.escape(pattern)}'\. .*Available"
    ):
        make_engine(tiny_model("qwen3", tied=True), lr_groups={"model.norm.weight": 2.0, pattern: 0.1})


@pytest.mark.parametrize("factor", [-1.0, float("inf"), float("nan"), "much"])
def test_a_factor_is_a_number_and_not_below_zero(factor):
    with pytest.raises(ValidationError, match="lr_groups"):
        TorchTrainOptions(lr_groups={"*": factor})
