"""The reward pool as an environment sees it: awaited, a step's rows to a batch."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from enginehouse_rl.episodes.samples import check_figures

if TYPE_CHECKING:
    from enginehouse_rewards.pool import RewardPool
    from enginehouse_rewards.program import RowScore

    Scores = list[RowScore]


class Scorer:
    """Scores rows as they come. Called on one event loop.

    What is asked for in one turn of the loop goes to the pool at once, and what the pool's thread brings meanwhile is
    taken in at once: each time one thread wakes the other, both wait for the interpreter.

    Args:
        pool: who scores.
        rows: of a step or a validation: the pool judges failures by their share of so many.
    """

    def __init__(self, pool: RewardPool, rows: int):
        self._pool, self._rows = pool, rows
        self._batch, self._submitted = pool.batch(rows), 0
        self._asked: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[Scores]]] = []
        self._ended: collections.deque[tuple[asyncio.Future[Scores], Future[Scores]]] = collections.deque()

    async def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[RowScore]:
        """The score of each row.

        Raises:
            RewardError: as `RewardPool.score`.
            ConfigError: a figure's name is none that a metric can have.
        """
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._submit, loop)
        scored: asyncio.Future[Scores] = loop.create_future()
        self._asked.append((rows, scored))
        scores = await scored
        check_figures(scores, self._pool.function)
        return scores

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        asked = [(rows, scored) for rows, scored in self._asked if not scored.cancelled()]
        self._asked.clear()
        if self._submitted >= self._rows:
            self._batch, self._submitted = self._pool.batch(self._rows), 0
        self._submitted += sum(len(rows) for rows, _ in asked)
        try:
            futures = self._batch.submit_all([rows for rows, _ in asked])
        except Exception as error:  # nobody else would tell them
            for _, scored in asked:
                scored.set_exception(error)
            return
        for future, (_, scored) in zip(futures, asked, strict=True):
            scored.add_done_callback(partial(_cancel, future))
            future.add_done_callback(partial(self._note, loop, scored))

    def _note(self, loop: asyncio.AbstractEventLoop, scored: asyncio.Future[Scores], future: Future[Scores]) -> None:
        """By the pool's thread: it has ended."""
        self._ended.append((scored, future))
        if len(self._ended) == 1:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._hand_back)

    def _hand_back(self) -> None:
        while self._ended:
            scored, future = self._ended.popleft()
            if scored.done() or future.cancelled():
                continue
            if (error := future.exception()) is not None:
                scored.set_exception(error)
            else:
                scored.set_result(future.result())


def _cancel(future: Future[Scores], scored: asyncio.Future[Scores]) -> None:
    if scored.cancelled():
        future.cancel()
