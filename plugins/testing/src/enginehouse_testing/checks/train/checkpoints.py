"""Checks saving and resuming: in the same layout, in another layout, and while training continues."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, Seen, wrong
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, located
from enginehouse_testing.problem import batch
from enginehouse_testing.rank import Rank, weights_of

STEPS = 2

CHECKS = Checks(tolerance=1e-6)


def _begin(rank: Rank, engine: Any) -> None:
    torch.manual_seed(1 + rank.context.rank)
    shard = rank.shard(engine, batch())
    for _ in range(STEPS):
        step(engine, shard)


def _continue(rank: Rank, engine: Any) -> dict[str, Any]:
    """Return the state after a checkpoint: random numbers, metrics and weights."""
    numbers = torch.rand(4)
    shard = rank.shard(engine, batch())
    rates = [step(engine, shard)[1]["lr"] for _ in range(STEPS)]
    return {"numbers": numbers, "lr": rates, "weights": weights_of(engine)}


def save(rank: Rank, model: str = "tied") -> dict[str, Any]:
    """Train, save, and continue."""
    with rank.engine(model, **TRAINING) as engine:
        _begin(rank, engine)
        engine.save(rank.path("saved"))
        return _continue(rank, engine)


def _save_in_background(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        _begin(rank, engine)
        engine.save_in_background(rank.path("saved"))
        later = _continue(rank, engine)
        engine.finish_save()
        return later


def load(rank: Rank, model: str = "tied") -> dict[str, Any]:
    """Load, and continue."""
    torch.manual_seed(1000)
    with rank.engine(model, **TRAINING) as engine:
        engine.load(rank.path("saved"))
        return _continue(rank, engine)


@CHECKS.judge(save, load)
def checkpoint(saved: list[Seen], loaded: list[Seen]) -> Measured:
    """An engine that loads a checkpoint continues like the engine that saved it, with the same weights, optimizer
    state, schedule and random numbers on every rank."""
    for rank, (before, after) in enumerate(zip(saved, loaded, strict=True)):
        if not torch.equal(before.value["numbers"], after.value["numbers"]):
            return wrong(f"rank {rank} draws other random numbers after loading")
    return reshard_checkpoint(saved, loaded)


@CHECKS.judge(save, load, capability=capabilities.RESHARD_CHECKPOINT, between=True)
def reshard_checkpoint(saved: list[Seen], loaded: list[Seen]) -> Measured:
    """Training continues in the same way if another number of ranks loads the checkpoint."""
    right = saved[0].value
    measured = []
    for rank, result in enumerate(loaded):
        if result.value["lr"] != right["lr"]:
            return wrong(f"rank {rank} goes on with learning rates {result.value['lr']}, not {right['lr']}")
        difference = largest_difference(result.value["weights"], right["weights"])
        measured.append(located(difference, f"; rank {rank}, {STEPS} steps after loading"))
    return larger(*measured)


@CHECKS.judge(_save_in_background, load, capability=capabilities.BACKGROUND_SAVE)
def background_save(saved: list[Seen], loaded: list[Seen]) -> Measured:
    """A checkpoint that is written while training continues holds the state at the time of the request."""
    return checkpoint(saved, loaded)
