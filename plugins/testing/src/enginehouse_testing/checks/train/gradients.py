"""Checks gradients, which it reads through the public protocol.

AdamW's first step, without decay or clipping, changes a weight by `lr * g / (|g| + eps)`. If eps is far above any
gradient, that is almost `lr / eps * g`, and g follows exactly. `lr / eps` is so large that the change is far above the
rounding of a weight, even for weights that are sent in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from enginehouse_testing.check import Checks, Measured, Seen
from enginehouse_testing.checks.train import reference
from enginehouse_testing.comparison import larger, located, relative_to_norm
from enginehouse_testing.problem import MODELS, POLICY, batch, batch_of
from enginehouse_testing.rank import Rank, weights_of

EPS = 1e4
LR = 1e10
READING: dict[str, Any] = {"lr": LR, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": 1e30, "schedule": "constant"}
"""Options under which gradients can be read from weights."""

CHECKS = Checks(tolerance=1e-5)

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest error for a user's model. Gradients pass its layers twice, and are read from weights, which bfloat16 rounds
once more: 0.07 and 0.09 were measured with 30 layers of SmolLM2-135M on a GPU."""


def read_gradients(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute gradients from the weights before and after AdamW's first step with the options `READING`."""
    gradients = {}
    for name, weight in before.items():
        step = (weight.double() - after[name].double()) / LR
        gradients[name] = (EPS * step / (1 - step.abs())).float()
    return gradients


def take_step(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return the gradients of one step."""
    read = {}
    for model in models:
        with rank.engine(model, **READING) as engine:
            before = weights_of(engine)
            engine.forward_backward(rank.shard(engine, batch_of(model)), POLICY)
            engine.optim_step()
            read[model] = read_gradients(before, weights_of(engine))
    return read


@CHECKS.judge(take_step, tolerances=TOLERANCES)
def gradients(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """The gradient of one step agrees with the oracle on every rank. The error is relative to the norm of the
    gradient."""
    return larger(
        *(
            located(
                relative_to_norm(result.value[model], reference.gradients(model)[1]), f"; {model} model, rank {rank}"
            )
            for rank, result in enumerate(seen)
            for model in models
        )
    )


def _cut_otherwise(rank: Rank) -> list[dict[str, torch.Tensor]]:
    """Return one step's gradients with the whole batch split in several ways."""
    read = []
    whole = batch()
    for budget, calls, empty in ((10_000, 1, False), (16, 1, False), (40, 3, False), (40, 1, True)):
        with rank.engine("tied", **READING, tokens_per_microbatch=budget) as engine:
            before = weights_of(engine)
            sizes = [len(range(call, len(whole), calls)) for call in range(calls)]
            for part in whole.split(sizes):
                engine.forward_backward(rank.shard(engine, part, empty=empty), POLICY)
            engine.optim_step()
            read.append(read_gradients(before, weights_of(engine)))
    return read


@CHECKS.judge(_cut_otherwise)
def cut_independence(seen: list[Seen]) -> Measured:
    """The gradient does not depend on micro-batches, on the number of calls per step, or on uneven and empty shards."""
    right = reference.gradients("tied")[1]
    cuts = ("one micro-batch", "many micro-batches", "three calls a step", "an empty shard")
    return larger(
        *(
            located(relative_to_norm(gradients, right), f"; cut into {cut}")
            for result in seen
            for cut, gradients in zip(cuts, result.value, strict=True)
        )
    )
