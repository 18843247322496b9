"""What is left of an engine that was shut down."""

from __future__ import annotations

import psutil

from enginehouse.testing.check import PROTOCOL, Check, Measured, Seen
from enginehouse.testing.checks.train.reference import TRAINING
from enginehouse.testing.checks.train.training import step
from enginehouse.testing.problem import batch
from enginehouse.testing.rank import Rank

ENGINES = 3


def one_after_the_other(rank: Rank, model: str = "tied") -> int:
    """Threads that this process has gained by engines that have ended; those that stay for good come with the first."""
    threads = []
    for _ in range(1 + ENGINES):
        with rank.engine(model, **TRAINING) as engine:
            step(engine, rank.shard(engine, batch()))
        del engine
        threads.append(psutil.Process().num_threads())
    return threads[-1] - threads[0]


def judge(seen: list[Seen]) -> Measured:
    """By the rank that gained most."""
    gained = max(one.value for one in seen)
    return Measured(max(0.0, gained / ENGINES), f"{gained} threads more after {ENGINES} more engines")


CHECKS = (
    Check(
        name="shutdown",
        capability=PROTOCOL,
        claim="An engine that was shut down leaves no threads behind: of a process group that is still held they stay, "
        "and spin once its other ranks have left",
        tolerance=0.5,  # threads an engine: others of the process may come and go
        acts=(one_after_the_other,),
        judge=judge,
    ),
)
