"""The `torch` rollout engine with responses whose lengths have a heavy tail, whatever the model would say.

How long the responses to a prompt are is drawn, by the request's seed, from a Pareto distribution: so the sides of a
benchmark draw the same lengths. The engine's own work is as ever, a token at a time.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from enginehouse.engines.rollout import GenerateRequest, GenerateResult
from enginehouse_torch.rollout import TorchRolloutEngine

SHORTEST_TOKENS, SHAPE = 4, 1.0
"""One response in k is longer than k times the shortest."""


class HeavyTailRolloutEngine(TorchRolloutEngine):
    """See the module."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """As the `torch` engine, but for when a response ends."""
        sampling = request.sampling
        if sampling.max_tokens and sampling.seed is not None:
            tokens = min(drawn_tokens(sampling.seed), sampling.max_tokens)
            request = replace(request, sampling=replace(sampling, max_tokens=tokens, ignore_eos=True))
        return await super().generate(request)


def drawn_tokens(seed: int) -> int:
    """How long the responses to a request of this seed are, in tokens."""
    return int(SHORTEST_TOKENS * random.Random(seed).paretovariate(SHAPE))


def in_order(response: str, **columns: object) -> float:
    """A reward that responses of any length can have: the share of neighbours that do not descend."""
    pairs = list(itertools.pairwise(response))
    return sum(left <= right for left, right in pairs) / max(len(pairs), 1)
