"""Compares the gradient of a loss with finite differences of the loss."""

from __future__ import annotations

import math

import torch

from enginehouse_testing.check import Checks, Measured
from enginehouse_testing.loss_trial import LossTrial, OtherWay, Stopped
from enginehouse_testing.samples import now

STEPS = (3e-2, 1e-2, 3e-3)
"""Step sizes of the differences of the loss. A token's gradient is compared with the nearest difference, one-sided or
two-sided, because a large step may cross a kink, and a small step leaves only rounding."""

ROWS = 5

CHECKS = Checks()


@CHECKS.act(tolerance=5e-3)
def _gradient(trial: LossTrial) -> Measured:
    """Each token's gradient equals the measured slope of the loss; values that the loss detaches are kept constant."""
    batch = trial.samples().slice(0, ROWS)
    name = now(trial.record.output)
    column = batch.ragged(name)
    stopped = Stopped()
    view = trial.view(batch)
    with stopped:
        value = trial.call(view)
    gradient = trial.gradient(view, value).double()

    def total(token: int, step: float) -> float:
        moved = column.values.clone()
        moved[token] += step
        view = trial.view(batch.with_columns(**{name: column.like(moved)}))
        with stopped.held():
            return trial.call(view).total.double().item()

    def differences(token: int, step: float) -> list[float]:
        try:
            after, here, before = total(token, step), total(token, 0.0), total(token, -step)
        except OtherWay:
            return [math.nan] * 3
        return [(after - before) / (2 * step), (after - here) / step, (here - before) / step]

    counted = batch.ragged("loss_mask").values.nonzero().flatten().tolist()
    slopes = torch.tensor(
        [[slope for step in STEPS for slope in differences(token, step)] for token in counted], dtype=torch.float64
    )
    own = gradient[counted]
    errors = (slopes - own[:, None]).abs().nan_to_num(nan=math.inf).amin(1)
    scale = max(float(own.abs().max()), float(slopes.nan_to_num().abs().max()), 1e-6)
    worst = int(errors.argmax())
    return Measured(
        float(errors[worst]) / scale,
        f"the gradient of token {counted[worst]} is {own[worst]:.4g}, but the slope of the loss is "
        f"{slopes[worst, 0]:.4g}; values that the loss detaches, or computes under no_grad, were kept constant",
    )
