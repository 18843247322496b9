"""All checks of advantages, in the order they are run and reported."""

from __future__ import annotations

import torch

from enginehouse_testing.advantage_trial import AdvantageTrial, by_token, problem_of
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.samples import with_others_changed, with_silent

ROUNDING = 1e-5
"""Of sums in float32, in another order."""


def _column(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    made = trial.call(batch)
    said = problem_of(made, batch)
    return wrong(said) if said else Measured(0.0)


def _needs(trial: AdvantageTrial) -> Measured:
    needs = trial.record.needs
    if needs is None:
        return Measured(0.0, "it declares no needs, and is given every column")
    batch = trial.samples()
    own = [name for name in trial.given.columns if name not in needs]
    absent = [name for name in needs if name not in batch]
    if absent:
        return wrong(f"it needs {', '.join(absent)}, which the suite's samples do not have; say so in `columns`")
    given = by_token(trial.call(batch.select([*needs, *own])), batch)
    return _apart(given, trial.credits(batch), "with the columns it declares alone, ")


def _order(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    moved, right = batch.take(order), trial.call(batch).take(order)
    return _apart(trial.credits(moved), by_token(right, moved), "with rows in another order, ")


def _labels(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    others = batch.with_columns(group=1_000_003 - 17 * batch["group"])
    return _apart(trial.credits(others), trial.credits(batch), "with other numbers for the same groups, ")


def _equal_rewards(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    of_group = batch["group"] == batch["group"][0]
    for what, chosen in (("one group", of_group), ("all groups", torch.ones_like(of_group))):
        equal = batch.with_columns(
            reward=torch.where(chosen, 0.7, batch["reward"]),
            rewards=torch.where(chosen[:, None], 0.7, batch["rewards"]),
        )
        if said := problem_of(trial.call(equal), equal):
            return wrong(f"where all rewards of {what} are equal: {said}")
    return Measured(0.0)


def _one_sample(trial: AdvantageTrial) -> Measured:
    if trial.record.compares_samples:
        return Measured(0.0, "it declares that it compares samples, and is never given one alone")
    batch = trial.samples(groups=5, size=1)
    said = problem_of(trial.call(batch), batch)
    return wrong(f"with one sample of each prompt: {said}") if said else Measured(0.0)


def _uncounted(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    return _apart(
        trial.credits(with_others_changed(batch)),
        trial.credits(batch),
        "with other numbers at tokens that do not count, ",
    )


def _silent_rows(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    silent = with_silent(batch, [0, 1, len(batch) - 1])
    said = problem_of(trial.call(silent), silent)
    return wrong(f"with rows in which no token counts: {said}") if said else Measured(0.0)


def _untouched(trial: AdvantageTrial) -> Measured:
    batch = trial.samples()
    before = batch.clone()
    trial.call(batch)
    changed = [name for name in batch.columns if not batch.select([name]).equal(before.select([name]))]
    return wrong(f"it wrote into {', '.join(changed)}") if changed else Measured(0.0)


def _repeatable(trial: AdvantageTrial) -> Measured:
    torch.manual_seed(0)
    first = trial.credits(trial.samples())
    return _apart(trial.credits(trial.samples()), first, "the second time ")


def _apart(given: torch.Tensor, right: torch.Tensor, when: str) -> Measured:
    scale = max(1.0, float(right.abs().max()))
    errors = (given - right).abs() / scale
    worst = int(errors.nan_to_num(nan=torch.inf).argmax())
    return Measured(
        float(errors[worst]), f"{when}the advantage of a token is {given[worst]:.6g}, not {right[worst]:.6g}"
    )


CHECKS: tuple[Check, ...] = tuple(
    Check(name=name, capability=PROTOCOL, claim=claim, tolerance=tolerance, acts=(act,), judge=found)
    for name, act, tolerance, claim in (
        (
            *("column", _column, EXACT),
            "It adds finite advantages, one a row or ragged like loss_mask, and drops no row",
        ),
        ("needs", _needs, ROUNDING, "The columns that its record declares are all that it reads"),
        ("order", _order, ROUNDING, "Each row's advantage is the same wherever it stands; groups need not be adjacent"),
        ("labels", _labels, ROUNDING, "Numbers of groups say which rows belong together, and nothing else"),
        (
            "equal_rewards",
            _equal_rewards,
            EXACT,
            "Advantages are finite where all rewards of a group are equal, or all",
        ),
        ("one_sample", _one_sample, EXACT, "It takes one sample of a prompt, unless it declares that it compares them"),
        ("uncounted", _uncounted, ROUNDING, "Nothing depends on numbers at tokens that loss_mask does not count"),
        ("silent_rows", _silent_rows, EXACT, "It takes rows in which no token counts"),
        ("untouched", _untouched, EXACT, "It writes into no column in place"),
        ("repeatable", _repeatable, EXACT, "The same samples give the same a second time"),
    )
)
