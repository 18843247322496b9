"""Which requests may be drawn beside each other, so that a seed gives the same tokens whatever runs beside.

SGLang draws a whole batch in one of two ways: by token ids, or, where any row of it has `top_p`, `top_k` or is greedy,
by ranks of likelihood (0.5.23, `Sampler._sample_from_probs`). A seeded row gets other tokens in the one than in the
other.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from enginehouse.engines.rollout import SamplingParams

Kind = Literal["seeded by id", "ranked"]


def classify(sampling: SamplingParams, seeded: bool) -> Kind | None:
    """What a request is; None: it may be drawn beside all others."""
    if sampling.max_tokens == 0:
        return None
    if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
        return "ranked"
    return "seeded by id" if seeded else None


class BatchGate:
    """Lets requests of one kind be drawn at a time; those of the other wait, in the order they came."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._drawn = 0
        self._waiting: collections.deque[tuple[Kind, asyncio.Future[None]]] = collections.deque()

    @asynccontextmanager
    async def of(self, kind: Kind | None) -> AsyncIterator[None]:
        """Wait for a kind's turn, and have it for the length of the `with` statement."""
        if kind is None:
            yield
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._drawn -= 1
            self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._drawn or self._waiting[0][0] == self._kind):
            kind, turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                self._kind, self._drawn = kind, self._drawn + 1
                turn.set_result(None)
