"""The reward pool as an environment sees it: awaited, a step's rows to a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginehouse.rl.samples import check_figures

if TYPE_CHECKING:
    from enginehouse.rl.rewards.pool import RewardPool
    from enginehouse.rl.rewards.program import Score


class Scorer:
    """Scores rows as they come. Called on one event loop.

    Args:
        pool: who scores.
        rows: of a step or a validation: the pool judges failures by their share of so many.
    """

    def __init__(self, pool: RewardPool, rows: int):
        self._pool, self._rows = pool, rows
        self._batch, self._submitted = pool.batch(rows), 0

    async def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        """The score of each row.

        Raises:
            RewardError: as `RewardPool.score`.
            ConfigError: a figure's name is none that a metric can have.
        """
        if self._submitted >= self._rows:
            self._batch, self._submitted = self._pool.batch(self._rows), 0
        self._submitted += len(rows)
        scores = await asyncio.wrap_future(self._batch.submit(rows))
        check_figures(scores, self._pool.function)
        return scores
