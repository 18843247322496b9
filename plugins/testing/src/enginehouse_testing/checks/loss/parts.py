"""What a loss returns, and that it depends on nothing but the tokens that count."""

from __future__ import annotations

import torch

from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.loss_trial import LossTrial, problems_of
from enginehouse_testing.samples import with_longer_prompts, with_others_changed, with_silent

ROUNDING = 1e-5
"""Of sums in float32, in another order."""


def _value(trial: LossTrial) -> Measured:
    view = trial.view(trial.samples())
    value = trial.call(view)
    said = problems_of(value)
    if not said and not value.weight > 0:
        said = [f"the weight is {value.weight}, though tokens count"]
    if not said and not value.total.requires_grad:
        said = [f"the total has no gradient by {trial.record.output}: all of it is detached"]
    if not said and not bool(trial.gradient(view, value).isfinite().all()):
        said = ["the gradient of a token is not finite"]
    return wrong("; ".join(said)) if said else Measured(0.0)


def _cut(trial: LossTrial) -> Measured:
    batch = trial.samples()
    whole = trial.of([batch])
    rows = len(batch)
    cuts = {"row by row": [1] * rows, "in two unequal parts": [2, rows - 2], "in threes": [3] * (rows // 3)}
    worst = Measured(0.0)
    for how, sizes in cuts.items():
        error, where = trial.of(batch.split(sizes)).apart(whole)
        if not error <= worst.error:
            worst = Measured(error, f"cut {how}, {where}")
    return worst


def _uncounted(trial: LossTrial) -> Measured:
    batch = trial.samples()
    whole = trial.of([batch])
    others = ~batch.ragged("loss_mask").values
    if bool(whole.gradient[others].any()):
        return wrong("a token that does not count has a gradient")
    error, where = trial.of([with_others_changed(batch)]).apart(whole)
    longer = with_longer_prompts(batch)
    counted = longer.ragged("loss_mask").values
    found_longer = trial.of([longer])
    lengthened = Measured(0.0)
    for name, one, other in (("total", found_longer.total, whole.total), ("weight", found_longer.weight, whole.weight)):
        if not abs(one - other) / max(1.0, abs(other)) <= lengthened.error:
            lengthened = Measured(
                abs(one - other) / max(1.0, abs(other)), f"with longer prompts the {name} is {one}, not {other}"
            )
    moved = float((found_longer.gradient[counted] - whole.gradient[~others]).abs().max())
    if not moved <= lengthened.error:
        lengthened = Measured(moved, f"with longer prompts the gradient of a token differs by {moved:.3g}")
    if not error <= lengthened.error:
        return Measured(error, f"with other numbers at tokens that do not count, {where}")
    return lengthened


def _silent_rows(trial: LossTrial) -> Measured:
    batch = trial.samples()
    rows = [2, 3, len(batch) - 1]
    kept = torch.tensor([row not in rows for row in range(len(batch))])
    silent = with_silent(batch, rows)
    with_them, without = trial.of([silent]), trial.of([batch.take(kept)])
    gradient = with_them.gradient[kept[batch.ragged("loss_mask").row]]
    error, where = without.apart(type(without)(with_them.total, with_them.weight, with_them.metrics, gradient))
    view = trial.view(silent.take(rows))
    alone = trial.call(view)
    said = problems_of(alone)
    if not said and (alone.total.item() != 0 or alone.weight != 0):
        said = [f"total {alone.total.item()} and weight {alone.weight}, where both are to be 0"]
    if not said and not bool(trial.gradient(view, alone).eq(0).all()):
        said = ["a gradient that is not 0"]
    if said:
        return wrong(f"of a micro-batch in which no token counts: {'; '.join(said)}")
    return Measured(error, f"without the rows in which no token counts, {where}")


def _untouched(trial: LossTrial) -> Measured:
    view = trial.view(trial.samples())
    before = {name: column.clone() for name, column in view.columns.items()}
    trial.call(view)
    changed = [name for name, column in before.items() if not torch.equal(view.columns[name], column)]
    gone = set(before) ^ set(view.columns)
    return wrong(f"it changed {', '.join(sorted({*changed, *gone}))}") if changed or gone else Measured(0.0)


def _repeatable(trial: LossTrial) -> Measured:
    batch = trial.samples()
    torch.manual_seed(0)
    first = trial.of([batch])
    error, where = trial.of([batch]).apart(first)
    return Measured(error, f"the second time {where}")


def _on_gpu(trial: LossTrial) -> Measured:
    batch = trial.samples()
    error, where = trial.of([batch], "cuda").apart(trial.of([batch]))
    return Measured(error, f"on a GPU {where}")


CHECKS = (
    Check(
        name="value",
        capability=PROTOCOL,
        claim="It returns a LossValue: a finite scalar with a gradient, a number to divide by, and figures that add up",
        tolerance=EXACT,
        acts=(_value,),
        judge=found,
    ),
    Check(
        name="cut",
        capability=PROTOCOL,
        claim="Loss, weight, figures and gradients are the same however rows are cut into micro-batches",
        tolerance=ROUNDING,
        acts=(_cut,),
        judge=found,
    ),
    Check(
        name="uncounted",
        capability=PROTOCOL,
        claim="Nothing depends on tokens that loss_mask does not count, nor on how many they are",
        tolerance=ROUNDING,
        acts=(_uncounted,),
        judge=found,
    ),
    Check(
        name="silent_rows",
        capability=PROTOCOL,
        claim="Rows in which no token counts change nothing, also where they are all of a micro-batch",
        tolerance=ROUNDING,
        acts=(_silent_rows,),
        judge=found,
    ),
    Check(
        name="untouched",
        capability=PROTOCOL,
        claim="It changes no column of its view",
        tolerance=EXACT,
        acts=(_untouched,),
        judge=found,
    ),
    Check(
        name="repeatable",
        capability=PROTOCOL,
        claim="The same view gives the same a second time",
        tolerance=EXACT,
        acts=(_repeatable,),
        judge=found,
    ),
    Check(
        name="gpu",
        capability=PROTOCOL,
        claim="A view on a GPU gives what one on the CPU gives",
        tolerance=1e-4,
        acts=(_on_gpu,),
        judge=found,
        device="cuda",
    ),
)
