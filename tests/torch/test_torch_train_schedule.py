"""The learning rate over the steps of a run, and clipping."""

import pytest
import torch
from torch_train_cases import POLICY, make_batch, make_engine

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
    assert rates[4] == pytest.approx(0.5)
    assert rates[8] == pytest.approx(0.0)
    assert rates == sorted(rates, reverse=True)


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
