"""KL estimators against the divergence computed from whole distributions."""

import math

import pytest
import torch

from enginehouse.controller import DistributedBatch
from enginehouse.data import Batch, Ragged
from enginehouse.errors import ConfigError
from enginehouse_rl.config.schema import KLConfig
from enginehouse_rl.losses.kl import (
    ESTIMATORS,
    KL_PENALTY,
    adapt_coefficient,
    resumed_coefficient,
    token_kl,
    with_kl_in_reward,
)


@pytest.fixture(scope="module")
def distributions():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator).mul(0.3).log_softmax(-1)
    reference = (policy + 0.1 * torch.randn(50, generator=generator)).log_softmax(-1)
    return policy, reference


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_over_the_policy_is_the_divergence(distributions, estimator):
    policy, reference = distributions
    expected = (policy.exp() * (policy - reference)).sum()
    estimated = (policy.exp() * token_kl(policy, reference, estimator)).sum()
    assert estimated == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", lambda policy, reference: (policy * 0).sum()),
        ("k2", lambda policy, reference: (policy.exp() * (policy - reference)).sum()),
        ("k3", lambda policy, reference: (reference.exp() * (reference - policy)).sum()),
    ],
)
def test_the_expected_gradient_as_a_loss_is_as_the_table_says(distributions, estimator, divergence):
    policy, reference = distributions
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * token_kl(logprobs, reference, estimator)).sum().backward()
    exact = policy.clone().requires_grad_()
    divergence(exact.log_softmax(-1), reference).backward()
    torch.testing.assert_close(logits.grad, exact.grad, atol=1e-6, rtol=1e-4)


def reverse(policy, reference):
    return (policy.exp() * (policy - reference)).sum()


def forward(policy, reference):
    return (reference.exp() * (reference - policy)).sum()


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k1", reverse), ("k3", lambda policy, reference: reverse(policy, reference) - forward(policy, reference))],
)
def test_the_expected_policy_gradient_of_a_term_in_the_reward_is_as_the_table_says(
    distributions, estimator, divergence
):
    """`plan` refuses `k3` there: near the reference the two cancel."""
    policy, reference = distributions
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    costs = token_kl(logprobs.detach(), reference, estimator)  # a number: the reward has no gradient
    (logprobs.detach().exp() * costs * logprobs).sum().backward()
    exact = policy.clone().requires_grad_()
    divergence(exact.log_softmax(-1), reference).backward()
    torch.testing.assert_close(logits.grad, exact.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [94.0, -94.0, 1e4])
def test_a_divergence_and_its_gradient_are_finite_however_far_apart_the_logprobs_are(estimator, log_ratio):
    logprobs = torch.tensor([-1.0 - log_ratio], requires_grad=True)
    divergence = token_kl(logprobs, torch.tensor([-1.0]), estimator)
    divergence.sum().backward()
    assert divergence.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_a_policy_far_beyond_its_reference_is_still_pulled_back_by_k3():
    logprobs = torch.tensor([-0.1], requires_grad=True)
    token_kl(logprobs, torch.tensor([-60.0]), "k3").sum().backward()
    assert logprobs.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_divergence(estimator):
    logprobs = torch.tensor([-1.0, -2.0, -30.0])
    assert token_kl(logprobs, logprobs, estimator).tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_never_negative(estimator):
    assert (token_kl(torch.randn(1000), torch.randn(1000), estimator) >= 0).all()


def test_k3_by_hand():
    value = token_kl(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), "k3").item()
    assert value == pytest.approx(0.5 - 1 - math.log(0.5))


def test_unknown_estimator_names_the_choices():
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        token_kl(torch.zeros(1), torch.zeros(1), "k4")


def test_in_the_reward_a_row_pays_for_its_own_tokens():
    ragged = Ragged.from_list
    batch = Batch(
        {
            "reward": torch.tensor([1.0, 1.0]),
            "loss_mask": ragged([[False, True, True], [False, True]], dtype=torch.bool),
            "old_logprobs": ragged([[9.0, -1.0, -2.0], [9.0, -3.0]], dtype=torch.float32),
            "reference_logprobs": ragged([[0.0, -1.5, -2.5], [0.0, -3.0]], dtype=torch.float32),
        }
    )
    for parts in (1, 2):
        penalised, mean = with_kl_in_reward(DistributedBatch.of(batch.split(parts)), 0.1, "k1")
        torch.testing.assert_close(penalised["reward"], torch.tensor([0.9, 1.0]))
        assert mean == pytest.approx(1 / 3)
        beside, mean = with_kl_in_reward(DistributedBatch.of(batch.split(parts)), 0.1, "k1", KL_PENALTY)
        torch.testing.assert_close(beside["reward"], torch.tensor([1.0, 1.0]))
        torch.testing.assert_close(beside["kl_penalty"], torch.tensor([0.1, 0.0]))
        assert mean == pytest.approx(1 / 3)
        by_token, mean = with_kl_in_reward(DistributedBatch.of(batch.split(parts)), 0.1, "k1", "token_rewards")
        torch.testing.assert_close(by_token["reward"], torch.tensor([1.0, 1.0]))
        paid = by_token.fetch(["token_rewards"])["token_rewards"]
        torch.testing.assert_close(paid.values, torch.tensor([0.0, -0.05, -0.05, 0.0, 0.0]))
        assert mean == pytest.approx(1 / 3)


@pytest.mark.parametrize("into", ["reward", "token_rewards", KL_PENALTY])
def test_a_token_that_does_not_count_costs_nothing_whatever_its_logprobs_are(into):
    ragged = Ragged.from_list
    batch = Batch(
        {
            "reward": torch.tensor([1.0]),
            "loss_mask": ragged([[False, True]], dtype=torch.bool),
            "rollout_logprobs": ragged([[-math.inf, -1.0]], dtype=torch.float32),
            "reference_logprobs": ragged([[-1.0, -1.5]], dtype=torch.float32),
        }
    )
    made, mean = with_kl_in_reward(DistributedBatch.of([batch]), 0.1, "k1", into)
    assert mean == pytest.approx(0.5)
    column = made.fetch([into])[into]
    total = column.values.sum().item() if isinstance(column, Ragged) else column.item()
    assert total == pytest.approx({"reward": 0.95, "token_rewards": -0.05, KL_PENALTY: 0.05}[into])


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.1, 0.2), (0.11, 0.202), (0.09, 0.198), (5.0, 0.204), (-1.0, 0.196)]
)
def test_an_adapted_coefficient_follows_the_divergence_by_at_most_two_percent(divergence: float, expected: float):
    assert adapt_coefficient(0.2, divergence, target=0.1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("earlier", "saved", "begins_with"),
    [
        ({"coefficient": 0.1, "target": 0.02}, 0.17, 0.17),
        ({"coefficient": 0.1, "target": 0.5}, 0.17, 0.17),  # another target: adapted to it from here on
        ({"coefficient": 0.2, "target": 0.02}, 0.17, 0.1),
        ({"coefficient": 0.1, "target": None}, 0.17, 0.1),
        ({"coefficient": 0.1, "target": 0.02}, None, 0.1),
        ({}, 0.17, 0.1),
    ],
)
def test_a_resumed_run_begins_with_the_adapted_coefficient_unless_the_config_changed_it(earlier, saved, begins_with):
    assert resumed_coefficient(KLConfig(coefficient=0.1, target=0.02), earlier, saved) == begins_with


def test_a_resumed_run_that_adapts_nothing_begins_with_the_configs_coefficient():
    assert resumed_coefficient(KLConfig(coefficient=0.1), {"coefficient": 0.1, "target": 0.02}, 0.17) == 0.1
