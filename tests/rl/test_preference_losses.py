"""Losses of preferences: derivatives by the formulas of the papers, numbers as TRL's, gradients as autograd's."""

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch_train_cases import make_batch, make_engine, plain_model

from enginehouse.data import Batch
from enginehouse.engines.train import LossSpec, Mean, Outputs
from enginehouse.roles.sequence_scores import VALUES, append_end, row_sums
from enginehouse_rl.preferences.bradley_terry import bradley_terry
from enginehouse_rl.preferences.dpo import dpo
from enginehouse_rl.preferences.kto import kto
from enginehouse_rl.preferences.loop import BY_ROW, below_chance, split_items
from enginehouse_rl.preferences.slopes import accuracy, with_weights
from enginehouse_testing.models import stepped_model, tiny_model

# What a model makes of 8 pairs, and what TRL 1.16's trainers log of the same model and data (beta 0.3, one weight 1.5).
POLICY = torch.tensor([
    -6.25611, -21.16926, -9.59683, -17.81153, -17.00669, -22.58, -18.40284, -36.79329,
    -24.26252, -31.21712, -22.64945, -9.7765, -16.13513, -34.95584, -23.63563, -11.11867,
])  # fmt: skip
REFERENCE = torch.tensor([
    -7.21481, -19.32505, -12.45018, -11.12725, -15.02583, -19.01393, -21.30888, -26.64409,
    -18.6802, -28.45553, -27.10945, -10.84907, -16.21691, -26.84638, -26.42135, -7.33294,
])  # fmt: skip
TOKENS = torch.tensor([2, 5, 3, 4, 5, 4, 4, 7, 5, 7, 6, 3, 4, 7, 6, 2])
RATED = torch.tensor([-21.16926, -9.59683, -17.00669, -36.79329, -24.26252, -22.64944, -34.95584, -23.63563])
RATED_REFERENCE = torch.tensor([-19.32505, -12.45017, -15.02583, -26.64409, -18.6802, -27.10945, -26.84638, -26.42135])
MISMATCHED = -torch.tensor([-1.07916, 5.55131, 7.41292, 4.07072, -2.12047, 9.86011, 0.30613, -3.27762])
LABEL = torch.tensor([False, True, True, False, True, True, False, True])
SCORES = torch.tensor([
    1.08133, -0.47833, -3.17026, -3.12968, 0.50092, -2.11945, 1.3082, 0.72622,
    -0.81381, 0.70378, -0.46213, -1.50555, -2.86076, -2.18354, -2.26876, -1.25308,
])  # fmt: skip
BETA = 0.3


def mean(found, name):
    return found.metrics[name].mean().item()


@pytest.mark.parametrize(("items", "each", "sizes"), [(9, 4, [4, 5]), (8, 4, [4, 4]), (1, 4, [1]), (10, 4, [4, 4, 2])])
def test_no_part_of_a_validation_is_one_item_alone(items, each, sizes):
    parts = split_items(items, each)
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == list(range(items))


@pytest.mark.parametrize(
    ("losses", "below"),
    [([0.693, 0.6931, 0.692, 0.694], False), ([0.69, 0.6, 0.5, 0.45], True), ([0.6932] * 3, False), ([0.1], False)],
)
def test_a_reward_model_has_learnt_where_its_loss_is_below_chance(losses, below):
    assert below_chance(losses) == below


def test_a_tie_is_half_right():
    assert accuracy(torch.tensor([0.5, 0.0, -0.5, -0.0])).tolist() == [1.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize(("loss", "theirs"), [("sigmoid", 0.33025184), ("hinge", 0.31622249), ("ipo", 1.40943205)])
def test_pairs_are_judged_as_by_trl(loss, theirs):
    found = dpo(POLICY, REFERENCE, TOKENS, loss=loss, beta=BETA)
    assert found.losses.mean().item() == pytest.approx(theirs, abs=1e-5)
    assert mean(found, "accuracy") == 0.875
    if loss != "ipo":  # there, rewards are of means over tokens
        theirs = {"margin": 1.5866394, "rewards/chosen": 0.2430902, "rewards/rejected": -1.3435493}
        assert {name: mean(found, name) for name in theirs} == pytest.approx(theirs, abs=1e-5)


def test_rated_responses_are_judged_as_by_trl():
    found = kto(RATED, RATED_REFERENCE, LABEL, MISMATCHED, beta=BETA, desirable_weight=1.5)
    assert found.losses.mean().item() == pytest.approx(0.49171835, abs=1e-5)
    assert mean(found, "kl") == 0.0
    rewards = [mean(found, "rewards/chosen"), mean(found, "rewards/rejected")]
    assert rewards == pytest.approx([0.15215306, -2.01028649], abs=1e-5)
    other = kto(RATED_REFERENCE, RATED, LABEL, -MISMATCHED, beta=BETA, undesirable_weight=1.5)
    assert other.losses.mean().item() == pytest.approx(0.83538049, abs=1e-5)
    assert mean(other, "kl") == pytest.approx(2.59049225, abs=1e-5)


def test_scores_are_judged_as_by_trl():
    found = bradley_terry(SCORES)
    assert found.losses.mean().item() == pytest.approx(0.73111886, abs=1e-5)
    assert (mean(found, "accuracy"), mean(found, "margin")) == pytest.approx((0.5, 0.31929439), abs=1e-5)


def of_pairs(slopes):
    """The slope of a pair is its first row's, and less than nothing of its second's."""
    first, second = slopes.view(-1, 2).unbind(1)
    assert torch.equal(first, -second)
    return first


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_slope_of_dpo_is_that_of_its_formula(smoothing):
    slopes = of_pairs(dpo(POLICY, REFERENCE, TOKENS, beta=BETA, label_smoothing=smoothing).slopes)
    ratios = (POLICY.double() - REFERENCE.double()).view(-1, 2)
    h = BETA * (ratios[:, 0] - ratios[:, 1])
    wanted = -BETA * ((1 - smoothing) * torch.sigmoid(-h) - smoothing * torch.sigmoid(h)) / len(h)
    torch.testing.assert_close(slopes, wanted, atol=1e-12, rtol=0)


def test_the_slopes_of_its_variants_are_those_of_their_formulas():
    ratios = (POLICY.double() - REFERENCE.double()).view(-1, 2)
    h = ratios[:, 0] - ratios[:, 1]
    hinge = of_pairs(dpo(POLICY, REFERENCE, TOKENS, loss="hinge", beta=BETA).slopes)
    torch.testing.assert_close(hinge, -BETA * (BETA * h < 1).double() / len(h), atol=1e-12, rtol=0)
    each = ratios / TOKENS.view(-1, 2)
    ipo = dpo(POLICY, REFERENCE, TOKENS, loss="ipo", beta=BETA).slopes.view(-1, 2)
    slope = 2 * (each[:, 0] - each[:, 1] - 1 / (2 * BETA)) / len(h)
    wanted = torch.stack([slope, -slope], 1) / TOKENS.view(-1, 2)
    torch.testing.assert_close(ipo, wanted, atol=1e-12, rtol=0)


def test_the_slope_of_a_reward_model_is_that_of_its_formula():
    margin = torch.linspace(-1, 2, 8)
    slopes = of_pairs(bradley_terry(SCORES, margin).slopes)
    pairs = SCORES.double().view(-1, 2)
    wanted = -torch.sigmoid(-(pairs[:, 0] - pairs[:, 1] - margin.double())) / 8
    torch.testing.assert_close(slopes, wanted, atol=1e-12, rtol=0)


def test_the_slope_of_kto_is_that_of_its_formula_and_its_zero_point_has_none():
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    slopes = kto(RATED, RATED_REFERENCE, LABEL, -MISMATCHED, beta=BETA, **weights).slopes
    above = BETA * (RATED.double() - RATED_REFERENCE.double() + MISMATCHED.double().mean())
    share = torch.sigmoid(above)
    wanted = torch.where(LABEL, -1.5, 0.5).double() * BETA * share * (1 - share) / len(LABEL)
    torch.testing.assert_close(slopes, wanted, atol=1e-12, rtol=0)


def plain_sums(model, batch):
    """The sum of each response's logprobs, differentiably, by transformers alone."""
    found = []
    for row in range(len(batch)):
        ids, mask = batch.row(row)["input_ids"], batch.row(row)["loss_mask"]
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        found.append(logprobs[mask[1:]].sum())
    return torch.stack(found)


def norm(loss, parameters):
    gradients = torch.autograd.grad(loss, [p for p in parameters if p.requires_grad])
    return torch.stack([gradient.norm() for gradient in gradients]).norm().item()


@pytest.mark.parametrize("cuts", [[8], [1, 4, 3]], ids=["whole", "pairs apart"])
def test_the_gradient_is_that_of_the_loss_however_pairs_are_cut(cuts):
    path = stepped_model(tiny_model(), 4, 1e-2)
    engine, batch = make_engine(path), make_batch(4, 2).select(["input_ids", "loss_mask"])
    reference = row_sums(make_engine(tiny_model()).forward(batch, Outputs()).ragged("logprobs"))
    tokens = row_sums(batch.ragged("loss_mask"))
    found = dpo(row_sums(engine.forward(batch, Outputs()).ragged("logprobs")), reference, tokens, beta=BETA)
    parts = with_weights(batch, found.slopes).split(cuts)
    losses = [engine.forward_backward(part, LossSpec("weighted_logprob", BY_ROW))["loss"] for part in parts]

    model = plain_model(path)
    sums = plain_sums(model, batch)
    ratios = (sums - reference.float()).view(-1, 2)
    loss = -logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
    assert engine.optim_step()["grad_norm"] == pytest.approx(norm(loss, model.parameters()), rel=1e-4)
    linear = (found.slopes * sums.detach()).sum().item()
    assert sum(losses, Mean(0.0, 0.0)).value == pytest.approx(linear, rel=1e-4)


def test_the_gradient_of_a_reward_model_is_that_of_the_loss(tmp_path):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1).eval()
    model.save_pretrained(tmp_path)
    engine, batch = make_engine(str(tmp_path), head="value"), make_batch(4, 2)
    rows = append_end(batch)
    found = bradley_terry(row_sums(engine.forward(rows, VALUES).ragged("values")))
    for part in with_weights(rows, found.slopes).split([3, 5]):
        engine.forward_backward(part, LossSpec("weighted_value", BY_ROW, VALUES))
    scores = torch.stack([model(input_ids=batch.row(n)["input_ids"][None]).logits[0, 0] for n in range(len(batch))])
    loss = -logsigmoid(scores.view(-1, 2) @ torch.tensor([1.0, -1.0])).mean()
    assert found.losses.mean().item() == pytest.approx(loss.item(), abs=1e-5)
    assert engine.optim_step()["grad_norm"] == pytest.approx(norm(loss, model.parameters()), rel=1e-4)


def test_weights_make_a_mean_over_rows_a_sum_of_slopes():
    batch = make_batch(2, 2).select(["input_ids", "loss_mask"])
    slopes = torch.tensor([0.5, -0.5, 0.25, -0.25], dtype=torch.float64)
    weights = with_weights(batch, slopes).ragged("weights")
    assert isinstance(with_weights(batch, slopes), Batch)
    assert [set(row.tolist()) for row in weights] == [{-2.0}, {2.0}, {-1.0}, {1.0}]
