"""All checks of rewards, in the order they are run and reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.errors import ConfigError
from enginehouse_rewards.program import RowScore
from enginehouse_rl.episodes.samples import check_figures
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.reward_trial import RewardTrial


def _score(trial: RewardTrial) -> Measured:
    rows = trial.rows()
    scores = trial.scores(rows)
    if said := _failures(rows, scores):
        return wrong(said)
    try:
        check_figures(scores, trial.record.function)
    except ConfigError as error:
        return wrong(str(error))
    return Measured(0.0)


def _expected(trial: RewardTrial) -> Measured:
    worst = Measured(0.0, "" if trial.given.examples else "no example says what its reward is to be")
    for example, row in zip(trial.given.examples, trial.rows(), strict=False):
        if "reward" not in example:
            continue
        (score,) = trial.scores([row])
        error = abs(score.reward - float(example["reward"]))
        if not error <= worst.error:
            worst = Measured(error, f"of {_shown(row)} the reward is {score.reward:g}, not {example['reward']}")
    return worst


def _odd_responses(trial: RewardTrial) -> Measured:
    rows = trial.odd_rows()
    scores = trial.scores(list(rows.values()))
    said = [f"{what}: {score.failure}" for what, score in zip(rows, scores, strict=True) if score.failure]
    return wrong("; ".join(said)) if said else Measured(0.0)


def _quiet(trial: RewardTrial) -> Measured:
    rows = [row for row, score in zip(trial.rows(), trial.scores(trial.rows()), strict=True) if not score.failure]
    if not rows:
        return Measured(0.0, "no row has a score")
    printed = [score.reward for score in trial.watching.score(rows)]
    most = max(range(len(rows)), key=lambda row: printed[row])
    return Measured(printed[most], f"{printed[most]:g} bytes for {_shown(rows[most])}" if printed[most] else "")


def _repeatable(trial: RewardTrial) -> Measured:
    if not trial.given.repeatable:
        return Measured(0.0, "it says that it is not")
    rows = trial.rows()
    return _apart(trial.scores(rows), trial.scores(rows), rows, "the second time")


def _alone(trial: RewardTrial) -> Measured:
    if not trial.given.repeatable:
        return Measured(0.0, "it says that it is not repeatable")
    rows = trial.rows()
    together = trial.scores(rows)
    alone = [trial.scores([row])[0] for row in rows]
    back = trial.scores(rows[::-1])[::-1]
    one, other = _apart(together, alone, rows, "alone"), _apart(together, back, rows, "in another order")
    return max(one, other, key=lambda measured: measured.error)


def _failures(rows: Sequence[Mapping[str, Any]], scores: Sequence[RowScore]) -> str:
    failed = [(row, score.failure) for row, score in zip(rows, scores, strict=True) if score.failure]
    return f"{len(failed)} of {len(rows)} rows: {_shown(failed[0][0])} {failed[0][1]}" if failed else ""


def _apart(
    first: Sequence[RowScore], then: Sequence[RowScore], rows: Sequence[Mapping[str, Any]], when: str
) -> Measured:
    worst = Measured(0.0)
    for one, other, row in zip(first, then, rows, strict=True):
        names = {*one.figures, *other.figures}
        pairs = [(one.reward, other.reward), *((one.figures.get(name), other.figures.get(name)) for name in names)]
        for given, again in pairs:
            error = float("inf") if given is None or again is None else abs(given - again)
            if not error <= worst.error:
                worst = Measured(error, f"{when} {_shown(row)} gets {again}, not {given}")
    return worst


def _shown(row: Mapping[str, Any]) -> str:
    response = row["response"]
    return f"response {response[:40]!r}" + ("..." if len(response) > 40 else "")


CHECKS: tuple[Check, ...] = tuple(
    Check(name=name, capability=PROTOCOL, claim=claim, tolerance=tolerance, acts=(act,), judge=found)
    for name, act, tolerance, claim in (
        (
            *("score", _score, EXACT),
            "It is imported in another process, and gives each row, in time, a finite number or a mapping of such",
        ),
        ("expected", _expected, 1e-6, "Each example gets the reward that it says"),
        ("odd_responses", _odd_responses, EXACT, "Whatever a model says gets a score, in time"),
        ("quiet", _quiet, EXACT, "It prints nothing: a run shows nobody what it prints, but where a row fails"),
        ("repeatable", _repeatable, EXACT, "The same rows get the same a second time"),
        ("alone", _alone, EXACT, "A row's score does not depend on those that are scored beside it, or before"),
    )
)
