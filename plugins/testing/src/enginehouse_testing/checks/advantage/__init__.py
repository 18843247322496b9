"""The checks of advantages."""

from __future__ import annotations

import torch

from enginehouse_testing.advantage_trial import AdvantageTrial, by_token, problem_of
from enginehouse_testing.check import EXACT, Checks, Measured, wrong
from enginehouse_testing.samples import with_others_changed, with_silent

ROUNDING = 1e-5
"""Tolerance of float32 sums whose terms are added in another order."""

CHECKS = Checks(tolerance=ROUNDING)


@CHECKS.act(tolerance=EXACT)
def _column(trial: AdvantageTrial) -> str:
    """It adds finite advantages, either one per row or ragged like loss_mask, and drops no row."""
    batch = trial.samples()
    return problem_of(trial.call(batch), batch)


@CHECKS.act()
def _needs(trial: AdvantageTrial) -> Measured:
    """It reads no other columns than its record declares."""
    needs = trial.record.needs
    if needs is None:
        return Measured(0.0, "the record declares no `needs`, so a run passes every column")
    batch = trial.samples()
    columns = [name for name in trial.given.columns if name not in needs]
    absent = [name for name in needs if name not in batch]
    if absent:
        return wrong(f"the suite's samples lack columns of `needs`: {', '.join(absent)}. Add them to `columns`")
    credits = by_token(trial.call(batch.select([*needs, *columns])), batch)
    return _difference(credits, trial.credits(batch), "with only the columns that the record declares, ")


@CHECKS.act()
def _order(trial: AdvantageTrial) -> Measured:
    """A row's advantage does not depend on the row's position; groups need not be adjacent."""
    batch = trial.samples()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    moved, right = batch.take(order), trial.call(batch).take(order)
    return _difference(trial.credits(moved), by_token(right, moved), "with rows in another order, ")


@CHECKS.act()
def _labels(trial: AdvantageTrial) -> Measured:
    """Advantages do not depend on which numbers the groups have."""
    batch = trial.samples()
    renumbered = batch.with_columns(group=1_000_003 - 17 * batch["group"])
    return _difference(trial.credits(renumbered), trial.credits(batch), "with other numbers for the same groups, ")


@CHECKS.act(tolerance=EXACT)
def _equal_rewards(trial: AdvantageTrial) -> str:
    """Advantages are finite if all rewards of a group, or of the whole batch, are equal."""
    batch = trial.samples()
    of_group = batch["group"] == batch["group"][0]
    for rows, chosen in (("one group", of_group), ("all groups", torch.ones_like(of_group))):
        equal = batch.with_columns(
            reward=torch.where(chosen, 0.7, batch["reward"]),
            rewards=torch.where(chosen[:, None], 0.7, batch["rewards"]),
        )
        if problem := problem_of(trial.call(equal), equal):
            return f"where all rewards of {rows} are equal: {problem}"
    return ""


@CHECKS.act(tolerance=EXACT)
def _one_sample(trial: AdvantageTrial) -> Measured | str:
    """It accepts one sample per prompt, unless it declares that it compares samples."""
    if trial.record.compares_samples:
        return Measured(0.0, "it declares that it compares samples, so a run never passes a single sample of a prompt")
    batch = trial.samples(groups=5, size=1)
    problem = problem_of(trial.call(batch), batch)
    return problem and f"with one sample of each prompt: {problem}"


@CHECKS.act()
def _uncounted(trial: AdvantageTrial) -> Measured:
    """Numbers at tokens that loss_mask does not count have no influence."""
    batch = trial.samples()
    credits = trial.credits(with_others_changed(batch))
    return _difference(credits, trial.credits(batch), "with other numbers at tokens that do not count, ")


@CHECKS.act(tolerance=EXACT)
def _silent_rows(trial: AdvantageTrial) -> str:
    """It accepts rows in which no token counts."""
    batch = trial.samples()
    silent = with_silent(batch, [0, 1, len(batch) - 1])
    problem = problem_of(trial.call(silent), silent)
    return problem and f"with rows in which no token counts: {problem}"


@CHECKS.act(tolerance=EXACT)
def _untouched(trial: AdvantageTrial) -> str:
    """It changes no column in place."""
    batch = trial.samples()
    before = batch.clone()
    trial.call(batch)
    changed = [name for name in batch.columns if not batch.select([name]).equal(before.select([name]))]
    return f"it changed in place: {', '.join(changed)}" if changed else ""


@CHECKS.act(tolerance=EXACT)
def _repeatable(trial: AdvantageTrial) -> Measured:
    """The same samples give the same advantages a second time."""
    torch.manual_seed(0)
    first = trial.credits(trial.samples())
    return _difference(trial.credits(trial.samples()), first, "the second time ")


def _difference(credits: torch.Tensor, right: torch.Tensor, when: str) -> Measured:
    scale = max(1.0, float(right.abs().max()))
    errors = (credits - right).abs() / scale
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return Measured(
        float(errors[worst]), f"{when}the advantage of a token is {credits[worst]:.6g}, not {right[worst]:.6g}"
    )
