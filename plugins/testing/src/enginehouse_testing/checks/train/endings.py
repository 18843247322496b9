"""What is left of an engine that was shut down."""

from __future__ import annotations

import itertools

import psutil

from enginehouse_testing.check import PROTOCOL, Check, Measured, Seen
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.problem import batch
from enginehouse_testing.rank import Rank

ENGINES = 3


def one_after_the_other(rank: Rank, model: str = "tied") -> int:
    """Fewest threads that any engine after the first left in this process: others of the process come now and then."""
    threads = []
    for _ in range(1 + ENGINES):
        with rank.engine(model, **TRAINING) as engine:
            step(engine, rank.shard(engine, batch()))
        del engine
        threads.append(psutil.Process().num_threads())
    return min(after - before for before, after in itertools.pairwise(threads))


def judge(seen: list[Seen]) -> Measured:
    """By the rank that gained most."""
    gained = max(one.value for one in seen)
    return Measured(max(0.0, gained), f"at least {gained} threads more after each of {ENGINES} more engines")


CHECKS = (
    Check(
        name="shutdown",
        capability=PROTOCOL,
        claim="An engine that was shut down leaves no threads behind: of a process group that is still held they stay, "
        "and spin once its other ranks have left",
        tolerance=0.0,
        acts=(one_after_the_other,),
        judge=judge,
    ),
)
