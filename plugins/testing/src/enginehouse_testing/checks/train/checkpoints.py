"""Saving and going on: in the same layout, in another, and while training goes on."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import PROTOCOL, Check, Measured, Seen
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference
from enginehouse_testing.problem import batch
from enginehouse_testing.rank import Rank, weights_of

STEPS = 2
TOLERANCE = 1e-6


def _going_on(rank: Rank, engine: Any) -> dict[str, Any]:
    """What comes after a checkpoint: random numbers, figures and weights."""
    drawn = torch.rand(4)
    shard = rank.shard(engine, batch())
    figures = [step(engine, shard)[1] for _ in range(STEPS)]
    return {"drawn": drawn, "lr": [one["lr"] for one in figures], "weights": weights_of(engine)}


def _begin(rank: Rank, engine: Any) -> None:
    torch.manual_seed(1 + rank.context.rank)
    shard = rank.shard(engine, batch())
    for _ in range(STEPS):
        step(engine, shard)


def save(rank: Rank, model: str = "tied") -> dict[str, Any]:
    """Train, save, and go on."""
    with rank.engine(model, **TRAINING) as engine:
        _begin(rank, engine)
        engine.save(rank.path("saved"))
        return _going_on(rank, engine)


def _save_in_background(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        _begin(rank, engine)
        engine.save_in_background(rank.path("saved"))
        found = _going_on(rank, engine)
        engine.finish_save()
        return found


def load(rank: Rank, model: str = "tied") -> dict[str, Any]:
    """Load, and go on."""
    torch.manual_seed(1000)
    with rank.engine(model, **TRAINING) as engine:
        engine.load(rank.path("saved"))
        return _going_on(rank, engine)


def judge(saved: list[Seen], loaded: list[Seen]) -> Measured:
    """Whether it goes on as what was saved, in the same layout."""
    for rank, (before, after) in enumerate(zip(saved, loaded, strict=True)):
        if not torch.equal(before.value["drawn"], after.value["drawn"]):
            return Measured(float("inf"), f"rank {rank} draws other random numbers after loading")
    return judge_training(saved, loaded)


def judge_training(saved: list[Seen], loaded: list[Seen]) -> Measured:
    """Whether it goes on as what was saved."""
    right = saved[0].value
    measured = []
    for rank, one in enumerate(loaded):
        if one.value["lr"] != right["lr"]:
            return Measured(
                float("inf"), f"rank {rank} goes on with learning rates {one.value['lr']}, not {right['lr']}"
            )
        found = largest_difference(one.value["weights"], right["weights"])
        measured.append(Measured(found.error, f"{found.detail}; rank {rank}, {STEPS} steps after loading"))
    return larger(*measured)


CHECKS = (
    Check(
        name="checkpoint",
        capability=PROTOCOL,
        claim="An engine that loads a checkpoint goes on as the one that saved it: weights, optimizer, schedule, "
        "random numbers of every rank",
        tolerance=TOLERANCE,
        acts=(save, load),
        judge=judge,
    ),
    Check(
        name="reshard_checkpoint",
        capability=capabilities.RESHARD_CHECKPOINT,
        claim="A checkpoint goes on alike with another number of ranks",
        tolerance=TOLERANCE,
        acts=(save, load),
        judge=judge_training,
        between=True,
    ),
    Check(
        name="background_save",
        capability=capabilities.BACKGROUND_SAVE,
        claim="A checkpoint written while training goes on holds the state it was asked for at",
        tolerance=TOLERANCE,
        acts=(_save_in_background, load),
        judge=judge,
    ),
)
