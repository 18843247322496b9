"""Losses at their edges, and in the combinations that `test_oracles.py` has no numbers of.

That they do not depend on how a batch is cut, nor on what does not count, the suite shows:
`tests/testing/test_built_in_functions.py`.
"""

import inspect
import math

import pytest
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import TokenView
from enginehouse.errors import ConfigError
from enginehouse_rl.advantages.distillation import distillation
from enginehouse_rl.losses.cispo import cispo
from enginehouse_rl.losses.clipped_policy import clipped_policy
from enginehouse_rl.losses.clipped_value import clipped_value
from enginehouse_rl.losses.gspo import gspo
from enginehouse_rl.losses.policy_gradient import policy_gradient
from enginehouse_rl.losses.sapo import sapo
from enginehouse_rl.losses.supervised import supervised
from enginehouse_rl.losses.weighted_logprob import weighted_logprob

LENGTHS = (3, 5, 2, 4)
POLICY_LOSSES = (cispo, clipped_policy, gspo, policy_gradient, sapo)


def make_view(lengths=LENGTHS) -> TokenView:
    """Random columns; the first token of each row does not count."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    first = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[first] = False
    columns = {
        "loss_mask": mask,
        "old_logprobs": -torch.rand(tokens, generator=generator),
        "reference_logprobs": -torch.rand(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
        "weights": torch.randn(tokens, generator=generator),
        "values": torch.randn(tokens, generator=generator),
        "returns": torch.randn(tokens, generator=generator),
    }
    outputs = {"logprobs": -torch.rand(tokens, generator=generator), "entropy": torch.rand(tokens, generator=generator)}
    outputs["values"] = columns["values"] + torch.randn(tokens, generator=generator)
    columns["rollout_logprobs"] = -2 * torch.rand(tokens, generator=generator)
    return TokenView({k: v.clone().requires_grad_() for k, v in outputs.items()}, columns, row, len(lengths))


def by_hand(view, low, high, dual=None, kl=0.0, entropy=0.0, cap=None):
    """The clipped loss of each counted token, from the papers' formulas."""
    result = []
    for t in range(len(view.row)):
        if not view.columns["loss_mask"][t]:
            continue
        new, old = view.outputs["logprobs"][t].item(), view.columns["old_logprobs"][t].item()
        advantage = view.columns["advantages"][t].item()
        ratio = math.exp(new - old)
        surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        if dual is not None and advantage < 0:
            surrogate = max(surrogate, dual * advantage)
        weight = 1.0 if cap is None else min(math.exp(old - view.columns["rollout_logprobs"][t].item()), cap)
        log_r = view.columns["reference_logprobs"][t].item() - new
        divergence = kl * (math.exp(log_r) - 1 - log_r)
        result.append(weight * (divergence - surrogate) - entropy * view.outputs["entropy"][t].item())
    return result


@pytest.mark.parametrize(
    ("arguments", "hand"),
    [
        ({}, (0.2, 0.2)),
        (
            {"importance_cap": 0.9, "dual_clip": 1.1, "kl_coefficient": 0.5, "entropy_coefficient": 0.5},
            (0.2, 0.2, 1.1, 0.5, 0.5, 0.9),
        ),
    ],
)
def test_clipped_policy_equals_the_formula(arguments, hand):
    view = make_view()
    value = clipped_policy(view, **arguments)
    losses = by_hand(view, *hand)
    assert value.total.item() == pytest.approx(sum(losses), rel=1e-5)
    assert value.weight == len(losses)


def test_gradient_stops_outside_the_clip_range():
    view = make_view(lengths=(3,))
    view.columns["old_logprobs"].copy_(view.outputs["logprobs"].detach() - torch.tensor([0.0, 1.0, -1.0]))
    view.columns["advantages"].copy_(torch.tensor([0.0, 1.0, -1.0]))
    clipped_policy(view).total.backward()
    assert view.outputs["logprobs"].grad.tolist() == [0, 0, 0]


def test_metrics_report_what_was_clipped():
    view = make_view(lengths=(5,))
    view.columns["old_logprobs"].copy_(view.outputs["logprobs"].detach() - torch.tensor([0.0, 1.0, 0.0, 0.0, -1.0]))
    view.columns["advantages"].copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]))
    metrics = clipped_policy(view).metrics
    assert metrics["clip_fraction"].value == pytest.approx(0.25)
    assert metrics["ratio"].value == pytest.approx((math.e + 1 + 1 + 1 / math.e) / 4)


def test_weighted_logprob_reproduces_any_policy_gradient():
    """Given the clipped loss's own gradient as weights, it yields the same gradient."""
    view = make_view()
    clipped = clipped_policy(view)
    (gradient,) = torch.autograd.grad(clipped.total, view.outputs["logprobs"])
    view.columns["weights"].copy_(-gradient)
    general = weighted_logprob(view)
    (same,) = torch.autograd.grad(general.total, view.outputs["logprobs"])
    torch.testing.assert_close(same, gradient)
    assert general.weight == clipped.weight


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="Did you mean 'token_mean'"):
        clipped_policy(make_view(), aggregation="token_means")
    with pytest.raises(ConfigError, match="max_tokens"):
        clipped_policy(make_view(), aggregation="sequence_mean_token_sum_scaled")
    with pytest.raises(ConfigError, match="importance_cap, the largest weight of a token, must be more than 0"):
        clipped_policy(make_view(), importance_cap=0.0)
    with pytest.raises(ConfigError, match="Did you mean 'sequence'"):
        clipped_policy(make_view(), importance_cap=2.0, importance_level="sequences")
    with pytest.raises(ConfigError, match="Did you mean 'mask'"):
        clipped_policy(make_view(), importance_cap=2.0, importance_mode="masks")


def test_an_importance_weight_scales_a_tokens_gradient_and_is_cut_at_the_cap():
    view = make_view(lengths=(5,))
    view.columns["advantages"].fill_(1.0)
    view.columns["old_logprobs"].copy_(view.outputs["logprobs"].detach())  # every ratio is 1: nothing is clipped
    ratios = torch.tensor([9.0, 0.25, 1.0, 2.0, 40.0])
    view.columns["rollout_logprobs"].copy_(view.columns["old_logprobs"] - ratios.log())
    value = clipped_policy(view, importance_cap=2.5)
    value.total.backward()
    expected = [0.0, -0.25, -1.0, -2.0, -2.5]  # the first token does not count
    assert view.outputs["logprobs"].grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert value.metrics["importance_weight"].value == pytest.approx(5.75 / 4, rel=1e-5)
    assert value.metrics["importance_capped"].value == 0.25


def test_a_cap_of_one_cuts_nothing_where_both_engines_agree():
    view = make_view()
    view.columns["rollout_logprobs"].copy_(view.columns["old_logprobs"])
    value, plain = clipped_policy(view, importance_cap=1.0), clipped_policy(view)
    assert value.total.item() == plain.total.item()
    assert value.metrics["importance_capped"].value == 0
    assert "importance_weight" not in plain.metrics


def expected_gradient(loss, policy, old, drawn_from, reference, *, credits=None, **arguments):
    """The gradient by the logits of `policy`, log-probabilities of a vocabulary, of a loss in exact expectation: each
    token of the vocabulary is a row, and counts by how likely `drawn_from` draws it."""
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    leaf = logprobs.detach().requires_grad_()
    columns = {
        "loss_mask": torch.ones(len(policy), dtype=torch.bool),
        "advantages": torch.zeros(len(policy)) if credits is None else credits,
        "old_logprobs": old,
        "rollout_logprobs": drawn_from,
        "reference_logprobs": reference,
    }
    view = TokenView({"logprobs": leaf}, columns, torch.arange(len(policy)), len(policy))
    (slopes,) = torch.autograd.grad(loss(view, aggregation="token_mean", **arguments).total, leaf)
    (drawn_from.exp() * slopes * logprobs).sum().backward()
    return logits.grad


@pytest.fixture(scope="module")
def vocabulary():
    """Log-probabilities of eight tokens: of the policy, of it before the step, of an older one, and of a reference."""
    generator = torch.Generator().manual_seed(5)
    policy = torch.randn(8, generator=generator)

    def near(distance):
        return (policy + distance * torch.randn(8, generator=generator)).log_softmax(-1)

    return policy.log_softmax(-1), near(0.2), near(0.3), near(1.0)


def gradient_of_kl(policy, reference, forward=False):
    logits = policy.clone().requires_grad_()
    ours, theirs = logits.log_softmax(-1), reference
    first, second = (theirs, ours) if forward else (ours, theirs)
    (first.exp() * (first - second)).sum().backward()
    return logits.grad


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3", True), ("k3_unbiased", False)])
def test_a_kl_term_on_samples_of_older_weights_has_the_gradient_of_the_policy_as_it_is(
    vocabulary, loss, estimator, forward
):
    policy, _, older, reference = vocabulary
    term = {"kl_coefficient": 1.0, "kl_estimator": estimator}
    exact = gradient_of_kl(policy, reference, forward)
    gradient = expected_gradient(loss, policy, policy, older, reference, importance_cap=100.0, **term)
    torch.testing.assert_close(gradient, exact, atol=1e-6, rtol=1e-4)
    unweighted = expected_gradient(loss, policy, policy, older, reference, **term)
    assert (unweighted - exact).norm() > 0.05 * exact.norm()


def test_the_unbiased_kl_term_is_right_also_after_the_policy_has_moved(vocabulary):
    policy, before, older, reference = vocabulary
    term = {"kl_coefficient": 1.0, "kl_estimator": "k3_unbiased"}
    exact = gradient_of_kl(policy, reference)
    moved = expected_gradient(clipped_policy, policy, before, before, reference, **term)
    torch.testing.assert_close(moved, exact, atol=1e-6, rtol=1e-4)
    both = expected_gradient(clipped_policy, policy, before, older, reference, importance_cap=100.0, **term)
    torch.testing.assert_close(both, exact, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("older_by", [0.05, 0.2, 0.5])
def test_distillation_on_samples_of_older_weights_has_the_gradient_of_the_policy_as_it_is(vocabulary, older_by):
    policy, *_, teacher = vocabulary
    noise = torch.randn(8, generator=torch.Generator().manual_seed(6))
    older = (policy + older_by * noise).log_softmax(-1)
    mask = Ragged.from_list([[True]] * 8, dtype=torch.bool)

    def gradient(teacher):
        columns = {"old_logprobs": policy, "rollout_logprobs": older, "reference_logprobs": teacher}
        batch = Batch({"loss_mask": mask, **{name: mask.like(one) for name, one in columns.items()}})
        credits = distillation(batch)["advantages"].values
        drawn = (policy, policy, older, teacher)  # the policy has not moved since the step began
        return expected_gradient(policy_gradient, *drawn, credits=credits, importance_cap=100.0)

    torch.testing.assert_close(gradient(teacher), gradient_of_kl(policy, teacher), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(gradient(policy), torch.zeros(8), atol=1e-6, rtol=0)  # it is there: nothing pulls


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("apart", [-200.0, 100.0, 1e4])
def test_a_loss_and_its_gradient_are_finite_however_far_apart_the_logprobs_are(loss, advantage, apart):
    view = make_view()
    view.columns["advantages"].fill_(advantage)
    for column in ("old_logprobs", "reference_logprobs"):
        view.columns[column].copy_(view.outputs["logprobs"].detach() - apart)
    view.columns["rollout_logprobs"].copy_(view.columns["old_logprobs"] - apart)
    term = {"kl_coefficient": 0.1, "kl_estimator": "k3_unbiased"}
    for level in ("token", "sequence"):
        value = loss(view, importance_cap=2.0, importance_level=level, aggregation="token_mean", **term)
        (gradient,) = torch.autograd.grad(value.total, view.outputs["logprobs"])
        assert value.total.isfinite()
        assert gradient.isfinite().all()
        assert all(math.isfinite(figure.value) for figure in value.metrics.values())


def test_a_value_loss_without_a_clip_is_half_the_squared_error_and_tells_the_mean_value():
    view = make_view()
    counted = view.columns["loss_mask"]
    found, values = clipped_value(view, clip=None), view.outputs["values"][counted]
    expected = ((values - view.columns["returns"][counted]) ** 2).sum() / 2
    assert (found.total.item(), found.weight) == (pytest.approx(expected.item(), rel=1e-5), len(values))
    assert found.metrics["clip_fraction"].value == 0
    assert found.metrics["value_mean"].value == pytest.approx(values.mean().item(), rel=1e-5)


def test_a_value_beyond_the_clip_range_and_nearer_to_the_return_has_no_gradient():
    view = make_view(lengths=(4,))
    view.columns["values"].fill_(0.0)
    view.columns["returns"].fill_(2.0)
    with torch.no_grad():
        view.outputs["values"].copy_(torch.tensor([9.0, 1.0, 0.25, -1.0]))  # the first token does not count
    clipped_value(view, clip=0.5).total.backward()
    assert view.outputs["values"].grad.tolist() == [0.0, 0.0, -1.75, -3.0]


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_starts_as_the_policy_gradient(loss):
    """Where nothing has moved yet, all are the same update; that is what a wrong sign or factor would break."""
    view = make_view()
    view.columns["old_logprobs"].copy_(view.outputs["logprobs"].detach())
    (gradient,) = torch.autograd.grad(loss(view, aggregation="token_mean").total, view.outputs["logprobs"])
    expected = torch.where(view.columns["loss_mask"], -view.columns["advantages"], 0.0)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_policy_loss_takes_the_shared_arguments_and_says_so(loss):
    shared = dict(list(inspect.signature(clipped_policy).parameters.items())[4:])
    assert {"importance_cap", "aggregation", "kl_coefficient", "entropy_coefficient"} <= shared.keys()
    assert shared.keys() <= inspect.signature(loss).parameters.keys()
    assert all(f"    {name}: " in inspect.getdoc(loss) for name in inspect.signature(loss).parameters if name != "view")


def test_supervised_is_torchs_cross_entropy():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(3))
    chosen = torch.tensor([4, 0, 8, 1, 1, 5])
    logprobs = torch.cat([torch.zeros(1), logits.log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)])
    mask = torch.tensor([False, True, True, False, True, False, True])
    view = TokenView({"logprobs": logprobs}, {"loss_mask": mask}, torch.zeros(7, dtype=torch.int64), 1)
    value = supervised(view)
    labels = chosen.masked_fill(~mask[1:], -100)
    assert value.total.item() / value.weight == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
