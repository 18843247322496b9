"""Policies, which request tokens from a fleet, or from an object that replaces the fleet in a worker."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from enginehouse.data.templates import text_ends
from enginehouse.engines.rollout import GenerateRequest

if TYPE_CHECKING:
    from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams


class SamplingPolicy:
    """Base class of policies. Its `generate` calls `samples` for a single completion."""

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        (completion,) = await self.samples(tokens, 1, sampling)
        return completion

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """Return `n` completions of `tokens`."""
        raise NotImplementedError


class TokenSource(Protocol):
    """The source of a policy's tokens: a fleet, or an object that replaces it."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...


class FleetPolicy(SamplingPolicy):
    """Implements `enginehouse.engines.environment.Policy` for one task.

    Args:
        tokenizer: Tokenizer of the model. Its end-of-text tokens also end a response, unless `sampling.ignore_eos`.
        sampling: Sampling parameters for calls that set none.
        name: Prefix of the ids of the policy's requests.
        seed: Seed of the first call. The seed of each later call is derived from this seed and the number of the call.
        is_greedy: True to generate the most likely tokens, whatever temperature a call sets.
    """

    def __init__(
        self,
        fleet: TokenSource,
        tokenizer: Any,
        sampling: SamplingParams,
        name: str,
        seed: int,
        is_greedy: bool = False,
    ):
        self.tokenizer = tokenizer
        ends = () if sampling.ignore_eos else text_ends(tokenizer)  # engines know only those of the config
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
        self.sampling = replace(sampling, n=1, seed=None, stop_token_ids=stops)
        self._fleet, self._name, self._seed = fleet, name, seed
        self._is_greedy = is_greedy
        self._calls = 0

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        number, self._calls = self._calls, self._calls + 1
        sampling = replace(sampling or self.sampling, n=n, seed=self._make_seed(number))
        if self._is_greedy:
            sampling = replace(sampling, temperature=0.0)
        result = await self._fleet.generate(GenerateRequest(f"{self._name}-{number}", tokens, sampling))
        return result.completions

    def branch(self, name: str) -> FleetPolicy:
        return self._branch(name, self._is_greedy)

    def branch_greedily(self) -> FleetPolicy:
        """Return a branch that generates the most likely tokens."""
        return self._branch("greedy", True)

    def _branch(self, name: str, is_greedy: bool) -> FleetPolicy:
        branch_name, seed = f"{self._name}-{name}", self._mix_seed(name)
        return FleetPolicy(self._fleet, self.tokenizer, self.sampling, branch_name, seed, is_greedy)

    def _make_seed(self, number: int) -> int:
        return self._mix_seed(number) if number else self._seed

    def _mix_seed(self, part: object) -> int:
        mixed = hashlib.blake2b(f"{self._seed} {part}".encode(), digest_size=4).digest()
        return int.from_bytes(mixed, "little") >> 1
