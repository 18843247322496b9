"""Gradients, read through the public protocol.

AdamW's first step, without decay or clipping, changes a weight by `lr * g / (|g| + eps)`. With an eps far above any
gradient that is almost `lr / eps * g`, and g follows exactly. `lr / eps` is large enough that the change is far above
the rounding of a float32 weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from enginehouse_testing.check import PROTOCOL, Check, Measured, Seen
from enginehouse_testing.checks.train import reference
from enginehouse_testing.comparison import larger, relative_to_norm
from enginehouse_testing.problem import MODELS, POLICY, batch
from enginehouse_testing.rank import Rank, weights_of

EPS = 1e4
LR = 1e6
READING: dict[str, Any] = {"lr": LR, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": 1e30, "schedule": "constant"}
"""Options under which gradients can be read from weights."""


def read_gradients(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients that made AdamW's first step, under `READING`."""
    found = {}
    for name, weight in before.items():
        step = (weight.double() - after[name].double()) / LR
        found[name] = (EPS * step / (1 - step.abs())).float()
    return found


def one_step(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """The gradients of one step."""
    found = {}
    for model in models:
        with rank.engine(model, **READING) as engine:
            before = weights_of(engine)
            engine.forward_backward(rank.shard(engine, batch()), POLICY)
            engine.optim_step()
            found[model] = read_gradients(before, weights_of(engine))
    return found


def judge(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Against the oracle's."""
    measured = []
    for rank, one in enumerate(seen):
        for model in models:
            found = relative_to_norm(one.value[model], reference.gradients(model)[1])
            measured.append(Measured(found.error, f"{found.detail}; {model} model, rank {rank}"))
    return larger(*measured)


def _cut_otherwise(rank: Rank) -> list[dict[str, torch.Tensor]]:
    """One step's gradients with the whole batch cut in several ways."""
    found = []
    whole = batch()
    for budget, calls, empty in ((10_000, 1, False), (16, 1, False), (40, 3, False), (40, 1, True)):
        with rank.engine("tied", **READING, tokens_per_microbatch=budget) as engine:
            before = weights_of(engine)
            sizes = [0] * calls
            for row in range(len(whole)):
                sizes[row % calls] += 1
            for part in whole.split(sizes):
                engine.forward_backward(rank.shard(engine, part, empty=empty), POLICY)
            engine.optim_step()
            found.append(read_gradients(before, weights_of(engine)))
    return found


def _judge_cuts(seen: list[Seen]) -> Measured:
    right = reference.gradients("tied")[1]
    names = ("one micro-batch", "many micro-batches", "three calls a step", "an empty shard")
    measured = []
    for one in seen:
        for name, gradients in zip(names, one.value, strict=True):
            found = relative_to_norm(gradients, right)
            measured.append(Measured(found.error, f"{found.detail}; cut into {name}"))
    return larger(*measured)


CHECKS = (
    Check(
        name="gradients",
        capability=PROTOCOL,
        claim="The gradient of one step is the oracle's on every rank; relative to its norm",
        tolerance=1e-5,
        acts=(one_step,),
        judge=judge,
    ),
    Check(
        name="cut_independence",
        capability=PROTOCOL,
        claim="The gradient does not depend on micro-batches, calls a step, or uneven and empty shards",
        tolerance=1e-5,
        acts=(_cut_otherwise,),
        judge=_judge_cuts,
    ),
)
