"""The asynchronous interface of a reward pool, which combines the requests of a step into batches."""

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
    """Scores rows as requests arrive. All calls must come from one event loop.

    All requests of one iteration of the event loop go to the pool together. Results that the pool's thread delivers in
    quick succession are also returned together, because each wake-up of the event loop makes both threads wait for the
    GIL.

    Args:
        rows: Number of rows of a step or a validation. The pool limits failures to a fraction of these rows.
    """

    def __init__(self, pool: RewardPool, rows: int):
        self._pool, self._rows = pool, rows
        self._batch, self._submitted = pool.batch(rows), 0
        self._requests: list[tuple[Sequence[Mapping[str, Any]], asyncio.Future[Scores]]] = []
        self._results: collections.deque[tuple[asyncio.Future[Scores], Future[Scores]]] = collections.deque()

    async def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[RowScore]:
        """Return the score of each row.

        Raises:
            RewardError: The reward gives no score; see `RewardPool.score`.
            ConfigError: The reward returned a metric with a reserved or invalid name.
        """
        loop = asyncio.get_running_loop()
        if not self._requests:
            loop.call_soon(self._submit, loop)
        scored: asyncio.Future[Scores] = loop.create_future()
        self._requests.append((rows, scored))
        scores = await scored
        check_figures(scores, self._pool.function)
        return scores

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        requests = [(rows, scored) for rows, scored in self._requests if not scored.cancelled()]
        self._requests.clear()
        if self._submitted >= self._rows:
            self._batch, self._submitted = self._pool.batch(self._rows), 0
        self._submitted += sum(len(rows) for rows, _ in requests)
        try:
            futures = self._batch.submit_all([rows for rows, _ in requests])
        except Exception as error:  # otherwise the waiting callers would never return
            for _, scored in requests:
                scored.set_exception(error)
            return
        for future, (_, scored) in zip(futures, requests, strict=True):
            scored.add_done_callback(partial(_cancel, future))
            future.add_done_callback(partial(self._note, loop, scored))

    def _note(self, loop: asyncio.AbstractEventLoop, scored: asyncio.Future[Scores], future: Future[Scores]) -> None:
        """Record that a request has ended. Called by the pool's thread."""
        self._results.append((scored, future))
        if len(self._results) == 1:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._hand_back)

    def _hand_back(self) -> None:
        while self._results:
            scored, future = self._results.popleft()
            if scored.done() or future.cancelled():
                continue
            if (error := future.exception()) is not None:
                scored.set_exception(error)
            else:
                scored.set_result(future.result())


def _cancel(future: Future[Scores], scored: asyncio.Future[Scores]) -> None:
    if scored.cancelled():
        future.cancel()
