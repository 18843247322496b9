"""All checks of trackers, in the order they are run and reported."""

from __future__ import annotations

import math
from collections.abc import Sequence

from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, found, wrong
from enginehouse_testing.tracker_trial import Logged, TrackerTrial, steps

MANY = 2_000
"""Steps of a long run."""


def _life(trial: TrackerTrial) -> Measured:
    trial.run(steps(1, 5))
    return Measured(0.0)


def _outcomes(trial: TrackerTrial) -> Measured:
    trial.run(steps(1, 2), "interrupted")
    trial.run(steps(3, 4), "failed", resumed_after=2)
    trial.run([], "failed", resumed_after=4)
    return Measured(0.0)


def _written(trial: TrackerTrial) -> Measured:
    logged = steps(1, 5)
    trial.run(logged)
    return _kept(trial, logged)


def _resumed(trial: TrackerTrial) -> Measured:
    trial.run(steps(1, 3), "interrupted")
    trial.run(steps(3, 5), resumed_after=2)
    return _kept(trial, steps(1, 5))


def _not_finite(trial: TrackerTrial) -> Measured:
    odd: list[Logged] = [
        (step, {"actor/loss": value, "reward/mean": 0.5}, "train")
        for step, value in enumerate((math.nan, math.inf, -math.inf, 1e300), start=1)
    ]
    after: list[Logged] = [(5, {"actor/loss": 0.25}, "train")]
    trial.run([*odd, *after])
    return _kept(trial, after)


def _many(trial: TrackerTrial) -> Measured:
    logged: list[Logged] = [
        (step, {f"metric/{number}": float(step) for number in range(10)}, "train") for step in range(1, MANY + 1)
    ]
    trial.run(logged)
    return _kept(trial, logged[-1:])


def _kept(trial: TrackerTrial, logged: Sequence[Logged]) -> Measured:
    """Whether all that was logged can be read back, in float32, once the run has ended."""
    if trial.given.read is None:
        return Measured(0.0, "how it is read back is not given: only that nothing raises was seen")
    there = trial.read()
    for step, metrics, _ in logged:
        for name, value in metrics.items():
            values = [kept for at, kept in there.get(name, ()) if at == step]
            if not any(math.isclose(value, kept, rel_tol=1e-6, abs_tol=1e-9) for kept in values):
                found_there = f"{', '.join(map(str, values))} is there" if values else "nothing is there"
                return wrong(f"{name} of step {step} is {value:g}, and once the run has ended {found_there}")
    return Measured(0.0)


CHECKS: tuple[Check, ...] = tuple(
    Check(
        name=name,
        capability=PROTOCOL,
        claim=claim,
        tolerance=EXACT,
        acts=(act,),
        judge=found,
        reads=act in (_written, _resumed),
    )
    for name, act, claim in (
        ("life", _life, "It starts, takes metrics of steps and validations, and finishes"),
        ("outcomes", _outcomes, "It finishes however a run ends, and where nothing was logged"),
        ("written", _written, "Once it has finished, all that it was given can be read back"),
        ("resumed", _resumed, "A resumed run goes on with what is there; steps may come again"),
        ("not_finite", _not_finite, "Numbers that are not finite do no harm, nor to those that come after"),
        ("many", _many, f"It takes {MANY:,} steps in the time of a check"),
    )
)
