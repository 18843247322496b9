"""The checks of trackers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from enginehouse_testing.check import Checks, Measured
from enginehouse_testing.tracker_trial import Logged, TrackerTrial, steps

MANY = 2_000
"""Number of steps of a long run."""

CHECKS = Checks()


@CHECKS.act()
def _life(trial: TrackerTrial) -> str:
    """It starts, accepts metrics of steps and validations, and finishes."""
    trial.run(steps(1, 5))
    return ""


@CHECKS.act()
def _outcomes(trial: TrackerTrial) -> str:
    """It finishes after every outcome of a run, even if nothing was logged."""
    trial.run(steps(1, 2), "interrupted")
    trial.run(steps(3, 4), "failed", resumed_after=2)
    trial.run([], "failed", resumed_after=4)
    return ""


@CHECKS.act(reads=True)
def _written(trial: TrackerTrial) -> Measured | str:
    """Once it has finished, all that was logged can be read back."""
    logged = steps(1, 5)
    trial.run(logged)
    return _read_back(trial, logged)


@CHECKS.act(reads=True)
def _resumed(trial: TrackerTrial) -> Measured | str:
    """A resumed run adds to the earlier metrics; steps may occur again."""
    trial.run(steps(1, 3), "interrupted")
    trial.run(steps(3, 5), resumed_after=2)
    return _read_back(trial, steps(1, 5))


@CHECKS.act()
def _not_finite(trial: TrackerTrial) -> Measured | str:
    """Numbers that are not finite are accepted, and do no harm to later metrics."""
    odd: list[Logged] = [
        (step, {"actor/loss": value, "reward/mean": 0.5}, "train")
        for step, value in enumerate((math.nan, math.inf, -math.inf, 1e300), start=1)
    ]
    after: list[Logged] = [(5, {"actor/loss": 0.25}, "train")]
    trial.run([*odd, *after])
    return _read_back(trial, after)


@CHECKS.act()
def _many(trial: TrackerTrial) -> Measured | str:
    """It accepts 2,000 steps within the time limit of a check."""
    logged: list[Logged] = [
        (step, {f"metric/{number}": float(step) for number in range(10)}, "train") for step in range(1, MANY + 1)
    ]
    trial.run(logged)
    return _read_back(trial, logged[-1:])


def _read_back(trial: TrackerTrial, logged: Sequence[Logged]) -> Measured | str:
    """Check that all metrics can be read back, in float32, once the run has ended."""
    if trial.given.read is None:
        return Measured(0.0, "no `read` is given, so the check only saw that nothing raises an error")
    written = trial.given.read(trial.directory)
    for step, metrics, _ in logged:
        for name, value in metrics.items():
            values = [number for at, number in written.get(name, ()) if at == step]
            if not any(math.isclose(value, number, rel_tol=1e-6, abs_tol=1e-9) for number in values):
                instead = ", ".join(map(str, values)) or "nothing"
                return f"{name} of step {step} was logged as {value:g}, but {instead} can be read back"
    return ""
