"""The `torch` rollout engine with responses whose lengths have a heavy tail, whatever the model would say.

A request's seed draws the lengths of its responses from a Pareto distribution, so that all sides of a benchmark have
the same lengths. The engine's work is otherwise unchanged, a token at a time.
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
    """A `TorchRolloutEngine` that ends responses at drawn lengths."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate as the `torch` engine does, except for the ends of responses."""
        sampling = request.sampling
        if sampling.max_tokens and sampling.seed is not None:
            tokens = min(drawn_tokens(sampling.seed), sampling.max_tokens)
            request = replace(request, sampling=replace(sampling, max_tokens=tokens, ignore_eos=True))
        return await super().generate(request)


def drawn_tokens(seed: int) -> int:
    """Return the length, in tokens, of the responses to a request with this seed."""
    return int(SHORTEST_TOKENS * random.Random(seed).paretovariate(SHAPE))


def in_order(response: str, **columns: object) -> float:
    """Return a reward for responses of any length: the fraction of neighbouring characters that do not descend."""
    pairs = list(itertools.pairwise(response))
    return sum(left <= right for left, right in pairs) / max(len(pairs), 1)
