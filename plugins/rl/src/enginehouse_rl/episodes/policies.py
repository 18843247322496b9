"""What policies have in common, whoever draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginehouse.engines.rollout import Completion, SamplingParams


class BySamples:
    """The part of `enginehouse.engines.environment.Policy` that follows from another: one completion is one of one."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """See the protocol."""
        (completion,) = await self.samples(tokens, 1, sampling)
        return completion

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """See the protocol."""
        raise NotImplementedError
