"""Losses and advantages with one property broken each: what their suites exist to find."""

import torch

from enginehouse.data import Batch, Ragged
from enginehouse.engines import LossValue, Mean
from enginehouse_rl.advantages.groups import group_statistics


def parts(view):
    """Losses of the counted tokens, each minus advantage times ratio, and the mask."""
    counted = view.columns["loss_mask"]
    ratio = (view.outputs["logprobs"][counted] - view.columns["old_logprobs"][counted]).exp()
    return -ratio * view.columns["advantages"][counted], counted


def right(view, *, scale: float = 1.0):
    losses, _ = parts(view)
    return LossValue(
        scale * losses.sum(), float(len(losses)), {"size": Mean(float(losses.detach().sum()), len(losses))}
    )


def averages_each_micro_batch(view):
    losses, _ = parts(view)
    return LossValue(losses.sum() / max(len(losses), 1), float(len(losses) > 0))


def counts_masked_tokens(view):
    losses, counted = parts(view)
    return LossValue(losses.sum(), float(len(counted) if counted.any() else 0))


def adds_masked_tokens(view):
    losses, counted = parts(view)
    added = view.outputs["logprobs"].square().sum() * 0.01 if counted.any() else 0.0
    return LossValue(losses.sum() + added, float(len(losses)))


def counts_silent_rows(view):
    losses, _ = parts(view)
    return LossValue(losses.sum(), float(view.rows))


def is_nan_where_nothing_counts(view):
    losses, _ = parts(view)
    return LossValue(losses.mean() * len(losses), float(len(losses)))


def is_detached(view):
    losses, _ = parts(view)
    return LossValue(losses.detach().sum(), float(len(losses)))


def has_no_number_for_a_figure(view):
    losses, _ = parts(view)
    return LossValue(losses.sum(), float(len(losses)), {"size": float(losses.detach().mean())})


def has_a_figure_of_the_micro_batch(view):
    losses, _ = parts(view)
    return LossValue(losses.sum(), float(len(losses)), {"rows": Mean(float(losses.detach().sum() ** 2), 1.0)})


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(context, ratio):
        return ratio.square()

    @staticmethod
    def backward(context, gradient):
        return gradient


def has_a_wrong_backward(view):
    losses, _ = parts(view)
    return LossValue(Straight.apply(losses).sum(), float(len(losses)))


def loses_a_factor(view):
    """The ratio goes through Python, and its gradient is gone."""
    counted = view.columns["loss_mask"]
    logprobs = view.outputs["logprobs"][counted]
    ratio = torch.tensor([one.item() for one in (logprobs - view.columns["old_logprobs"][counted]).exp()])
    return LossValue(-(ratio * logprobs * view.columns["advantages"][counted]).sum(), float(len(logprobs)))


def stops_a_factor_on_purpose(view):
    counted = view.columns["loss_mask"]
    logprobs = view.outputs["logprobs"][counted]
    with torch.no_grad():
        ratio = (logprobs - view.columns["old_logprobs"][counted]).exp()
    return LossValue(-(ratio * logprobs * view.columns["advantages"][counted]).sum(), float(len(logprobs)))


def writes_into_a_column(view):
    value = right(view)
    view.columns["advantages"].mul_(0.5)
    return value


def is_random(view):
    return right(view, scale=1 + 1e-3 * torch.rand(()).item())


def reads_an_own_column(view):
    losses, counted = parts(view)
    return LossValue((losses * view.columns["rarity"][view.row][counted]).sum(), float(len(losses)))


# Advantages


def above_mean(batch):
    return group_statistics(batch["reward"], batch["group"])[1]


def centred(batch):
    return batch.with_columns(advantages=above_mean(batch).float())


def expects_adjacent_groups(batch):
    rewards = batch["reward"].reshape(-1, 3) if len(batch) % 3 == 0 else batch["reward"].reshape(-1, 1)
    return batch.with_columns(advantages=(rewards - rewards.mean(1, keepdim=True)).flatten())


def credits_the_first_more(batch):
    return batch.with_columns(advantages=(above_mean(batch) / (1 + torch.arange(len(batch)))).float())


def writes_into_rewards(batch):
    made = centred(batch)
    batch["reward"].sub_(batch["reward"].mean())
    return made


def forgets_the_column(batch):
    return batch


def credits_tokens_that_are_not_there(batch):
    mask = batch.ragged("loss_mask")
    return batch.with_columns(
        advantages=Ragged.from_lengths(torch.zeros(2 * len(batch)), [2] * len(batch)) if mask else 0
    )


def reads_more_than_it_needs(batch):
    return batch.with_columns(advantages=(above_mean(batch) * batch["response_tokens"]).float())


def believes_in_labels(batch):
    return batch.with_columns(advantages=(above_mean(batch) + 0.01 * batch["group"]).float())


def divides_by_nothing(batch):
    """As if some sample always differed; alone it is credited with nothing."""
    sizes, distances, deviations = group_statistics(batch["reward"], batch["group"])
    return batch.with_columns(advantages=torch.where(sizes > 1, distances / deviations, 0.0).float())


def needs_two_samples(batch):
    sizes, distances, _ = group_statistics(batch["reward"], batch["group"])
    return batch.with_columns(advantages=(distances / (sizes - 1)).float())


def sums_masked_tokens(batch):
    mask = batch.ragged("loss_mask")
    own = torch.zeros(len(batch)).index_add(0, mask.row, batch.ragged("values").values)
    own = torch.where(torch.zeros(len(batch)).index_add(0, mask.row, mask.values.float()) > 0, own, 0.0)
    return batch.with_columns(advantages=(above_mean(batch) - 0.1 * own).float())


def divides_by_counted_tokens(batch):
    mask = batch.ragged("loss_mask")
    counts = torch.zeros(len(batch)).index_add(0, mask.row, mask.values.float())
    scale = 1 / (1 / counts).sum()
    return batch.with_columns(advantages=(above_mean(batch) / scale).float().nan_to_num(posinf=float("nan")))


def draws_lots(batch):
    return batch.with_columns(advantages=(above_mean(batch) * (1 + 1e-3 * torch.rand(()))).float())


def drops_rows(batch: Batch) -> Batch:
    return centred(batch).slice(0, len(batch) - 1)
