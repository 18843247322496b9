"""Decides which requests SGLang may have in a batch, so that a seed gives the same tokens whatever else runs.

SGLang samples a whole batch in one of two ways: by token ids or, if any row has `top_p`, `top_k` or is greedy, by ranks
of likelihood (0.5.23, `Sampler._sample_from_probs`). A seeded row gets different tokens in the two ways.
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
    """Return a request's kind, or None if it may run beside all others."""
    if sampling.max_tokens == 0:
        return None
    if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
        return "ranked"
    return "seeded by id" if seeded else None


class BatchGate:
    """Admits requests of one kind at a time; requests of the other kind wait, in order of arrival."""

    def __init__(self) -> None:
        self._kind: Kind | None = None
        self._inside = 0
        self._waiting: collections.deque[tuple[Kind, asyncio.Future[None]]] = collections.deque()

    @asynccontextmanager
    async def enter(self, kind: Kind | None) -> AsyncIterator[None]:
        """Wait until a request of this kind may run. It counts as running until the `with` statement ends."""
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
                self._inside -= 1
            self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._inside or self._waiting[0][0] == self._kind):
            kind, turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                self._kind, self._inside = kind, self._inside + 1
                turn.set_result(None)
