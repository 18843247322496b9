"""Checks that an engine leaves nothing behind after its shutdown."""

from __future__ import annotations

import itertools

import psutil

from enginehouse_testing.check import Checks, Measured, Seen
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.problem import batch
from enginehouse_testing.rank import Rank

ENGINES = 3

CHECKS = Checks()


def count_threads(rank: Rank, model: str = "tied") -> int:
    """Return the smallest number of threads that an engine left behind. Threads of the first engine are not counted.
    The smallest number is returned because other threads come and go."""
    threads = []
    for _ in range(1 + ENGINES):
        with rank.engine(model, **TRAINING) as engine:
            step(engine, rank.shard(engine, batch()))
        del engine
        threads.append(psutil.Process().num_threads())
    return min(after - before for before, after in itertools.pairwise(threads))


@CHECKS.judge(count_threads)
def shutdown(seen: list[Seen]) -> Measured:
    """An engine that was shut down leaves no threads behind. A process group that is still referenced would keep its
    threads, which spin once the other ranks have left."""
    gained = max(rank.value for rank in seen)
    return Measured(max(0.0, gained), f"each of {ENGINES} engines left at least {gained} threads behind")
