"""Checks what a loss returns, and that it depends only on the tokens that count."""

from __future__ import annotations

import torch

from enginehouse_testing.check import EXACT, Checks, Measured, wrong
from enginehouse_testing.loss_trial import LossTotals, LossTrial, problems_of
from enginehouse_testing.samples import with_longer_prompts, with_others_changed, with_silent

ROUNDING = 1e-5
"""Tolerance of float32 sums whose terms are added in another order."""

CHECKS = Checks(tolerance=ROUNDING)


@CHECKS.act(tolerance=EXACT)
def _value(trial: LossTrial) -> str:
    """It returns a LossValue: a finite scalar total with a gradient, its weight, and metrics of type Mean or Max."""
    view = trial.view(trial.samples())
    value = trial.call(view)
    if problems := problems_of(value):
        return "; ".join(problems)
    if not value.weight > 0:
        return f"the weight is {value.weight}, although some tokens count"
    if not value.total.requires_grad:
        return f"the total has no gradient with respect to {trial.record.output}: it is detached"
    return "" if bool(trial.gradient(view, value).isfinite().all()) else "the gradient of a token is not finite"


@CHECKS.act()
def _cut(trial: LossTrial) -> Measured:
    """Loss, weight, metrics and gradients do not depend on how rows are split into micro-batches."""
    batch = trial.samples()
    whole = trial.totals([batch])
    rows = len(batch)
    cuts = {"row by row": [1] * rows, "in two unequal parts": [2, rows - 2], "in threes": [3] * (rows // 3)}
    worst = Measured(0.0)
    for how, sizes in cuts.items():
        error, where = trial.totals(batch.split(sizes)).difference(whole)
        if not error <= worst.error:
            worst = Measured(error, f"cut {how}, {where}")
    return worst


@CHECKS.act()
def _uncounted(trial: LossTrial) -> Measured:
    """Tokens that loss_mask does not count have no influence, and neither has their number."""
    batch = trial.samples()
    whole = trial.totals([batch])
    counted = batch.ragged("loss_mask").values
    if bool(whole.gradient[~counted].any()):
        return wrong("a token that does not count has a gradient")
    error, where = trial.totals([with_others_changed(batch)]).difference(whole)
    longer = with_longer_prompts(batch)
    totals = trial.totals([longer])
    moved = float((totals.gradient[longer.ragged("loss_mask").values] - whole.gradient[counted]).abs().max())
    worst = Measured(0.0)
    for difference, detail in (
        *(
            (abs(number - right) / max(1.0, abs(right)), f"the {name} is {number}, not {right}")
            for name, number, right in (("total", totals.total, whole.total), ("weight", totals.weight, whole.weight))
        ),
        (moved, f"the gradient of a token differs by {moved:.3g}"),
    ):
        if not difference <= worst.error:
            worst = Measured(difference, f"with longer prompts {detail}")
    if not error <= worst.error:
        return Measured(error, f"with other numbers at tokens that do not count, {where}")
    return worst


@CHECKS.act()
def _silent_rows(trial: LossTrial) -> Measured:
    """Rows in which no token counts change nothing, even if a micro-batch contains only such rows."""
    batch = trial.samples()
    rows = [2, 3, len(batch) - 1]
    counting = torch.tensor([row not in rows for row in range(len(batch))])
    silent = with_silent(batch, rows)
    with_them, without = trial.totals([silent]), trial.totals([batch.take(counting)])
    gradient = with_them.gradient[counting[batch.ragged("loss_mask").row]]
    error, where = without.difference(LossTotals(with_them.total, with_them.weight, with_them.metrics, gradient))
    view = trial.view(silent.take(rows))
    alone = trial.call(view)
    problems = problems_of(alone)
    if not problems and (alone.total.item() != 0 or alone.weight != 0):
        problems = [f"total and weight must be 0, not {alone.total.item()} and {alone.weight}"]
    if not problems and not bool(trial.gradient(view, alone).eq(0).all()):
        problems = ["the gradient must be 0"]
    if problems:
        return wrong(f"for a micro-batch in which no token counts: {'; '.join(problems)}")
    return Measured(error, f"without the rows in which no token counts, {where}")


@CHECKS.act(tolerance=EXACT)
def _untouched(trial: LossTrial) -> str:
    """It changes no column of its view in place."""
    view = trial.view(trial.samples())
    before = {name: column.clone() for name, column in view.columns.items()}
    trial.call(view)
    changed = {name for name, column in before.items() if not torch.equal(view.columns[name], column)}
    changed |= set(before) ^ set(view.columns)
    return f"it changed {', '.join(sorted(changed))}" if changed else ""


@CHECKS.act(tolerance=EXACT)
def _repeatable(trial: LossTrial) -> Measured:
    """The same view gives the same loss a second time."""
    batch = trial.samples()
    torch.manual_seed(0)
    first = trial.totals([batch])
    error, where = trial.totals([batch]).difference(first)
    return Measured(error, f"the second time {where}")


@CHECKS.act(tolerance=1e-4, device="cuda")
def _gpu(trial: LossTrial) -> Measured:
    """A view on a GPU gives the same loss as on the CPU."""
    batch = trial.samples()
    error, where = trial.totals([batch], "cuda").difference(trial.totals([batch]))
    return Measured(error, f"on a GPU {where}")
