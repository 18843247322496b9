"""The checks of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.errors import ConfigError
from enginehouse_rewards.program import RowScore
from enginehouse_rl.episodes.samples import check_figures
from enginehouse_testing.check import Checks, Measured
from enginehouse_testing.reward_trial import RewardTrial

CHECKS = Checks()


@CHECKS.act()
def _score(trial: RewardTrial) -> str:
    """It can be imported in another process, and gives each row a finite number, or a mapping of finite numbers, in
    time."""
    rows = trial.rows()
    scores = trial.scores(rows)
    failed = [(row, score.failure) for row, score in zip(rows, scores, strict=True) if score.failure]
    if failed:
        return f"{len(failed)} of {len(rows)} rows: {_shown(failed[0][0])} {failed[0][1]}"
    try:
        check_figures(scores, trial.record.function)
    except ConfigError as error:
        return str(error)
    return ""


@CHECKS.act(tolerance=1e-6)
def _expected(trial: RewardTrial) -> Measured:
    """Each example gets the reward that the example states."""
    worst = Measured(0.0, "" if trial.given.examples else "no example states its expected reward")
    for example, row in zip(trial.given.examples, trial.rows(), strict=False):
        if "reward" not in example:
            continue
        (score,) = trial.scores([row])
        error = abs(score.reward - float(example["reward"]))
        if not error <= worst.error:
            worst = Measured(error, f"the reward of {_shown(row)} is {score.reward:g}, not {example['reward']}")
    return worst


@CHECKS.act()
def _odd_responses(trial: RewardTrial) -> str:
    """Every response gets a score in time, whatever the model wrote."""
    rows = trial.odd_rows()
    scores = trial.scores(list(rows.values()))
    return "; ".join(f"{what}: {score.failure}" for what, score in zip(rows, scores, strict=True) if score.failure)


@CHECKS.act()
def _quiet(trial: RewardTrial) -> Measured:
    """It prints nothing, because a run shows what a reward prints only if a row fails."""
    rows = [row for row, score in zip(trial.rows(), trial.scores(trial.rows()), strict=True) if not score.failure]
    if not rows:
        return Measured(0.0, "no row has a score")
    printed = [score.reward for score in trial.watching.score(rows)]
    most = max(range(len(rows)), key=lambda row: printed[row])
    return Measured(printed[most], f"printed {printed[most]:g} bytes for {_shown(rows[most])}" if printed[most] else "")


@CHECKS.act()
def _repeatable(trial: RewardTrial) -> Measured:
    """The same rows get the same scores a second time."""
    if not trial.given.repeatable:
        return Measured(0.0, "not checked: the author declares that the reward is not repeatable")
    rows = trial.rows()
    return _difference(trial.scores(rows), trial.scores(rows), rows, "the second time")


@CHECKS.act()
def _alone(trial: RewardTrial) -> Measured:
    """A row's score does not depend on the rows that are scored with it or before it."""
    if not trial.given.repeatable:
        return Measured(0.0, "not checked: the author declares that the reward is not repeatable")
    rows = trial.rows()
    together = trial.scores(rows)
    alone = [trial.scores([row])[0] for row in rows]
    backwards = trial.scores(rows[::-1])[::-1]
    return max(
        _difference(together, alone, rows, "alone"),
        _difference(together, backwards, rows, "in another order"),
        key=lambda measured: measured.error,
    )


def _difference(
    first: Sequence[RowScore], then: Sequence[RowScore], rows: Sequence[Mapping[str, Any]], when: str
) -> Measured:
    worst = Measured(0.0)
    for before, after, row in zip(first, then, rows, strict=True):
        names = {*before.figures, *after.figures}
        pairs = [
            (before.reward, after.reward),
            *((before.figures.get(name), after.figures.get(name)) for name in names),
        ]
        for value, again in pairs:
            error = float("inf") if value is None or again is None else abs(value - again)
            if not error <= worst.error:
                worst = Measured(error, f"{when} {_shown(row)} gets {again}, not {value}")
    return worst


def _shown(row: Mapping[str, Any]) -> str:
    response = row["response"]
    return f"response {response[:40]!r}" + ("..." if len(response) > 40 else "")
