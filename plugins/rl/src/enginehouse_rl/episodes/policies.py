"""What policies have in common, whoever draws."""

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


class TokenSource(Protocol):
    """What a policy asks: a fleet, or what has one draw."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `RolloutFleet.generate`."""
        ...


class FleetPolicy(SamplingPolicy):
    """Implements `enginehouse.engines.environment.Policy` for one task.

    Args:
        fleet: who draws.
        tokenizer: the model's.
        sampling: how, unless a call says otherwise; what ends a text of the tokenizer's ends one here too.
        name: begins its requests' ids.
        seed: of its first call; what others draw depends on it and on their number.
        is_greedy: whether the likeliest tokens are taken, whatever a call says.
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
        ends = () if sampling.ignore_eos else text_ends(tokenizer)  # an engine knows those of the model's config alone
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
        self.sampling = replace(sampling, n=1, seed=None, stop_token_ids=stops)
        self._fleet, self._name, self._seed = fleet, name, seed
        self._is_greedy = is_greedy
        self._calls = 0

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """See the protocol."""
        number, self._calls = self._calls, self._calls + 1
        sampling = replace(sampling or self.sampling, n=n, seed=self._make_seed(number))
        if self._is_greedy:
            sampling = replace(sampling, temperature=0.0)
        result = await self._fleet.generate(GenerateRequest(f"{self._name}-{number}", tokens, sampling))
        return result.completions

    def branch(self, name: str) -> FleetPolicy:
        """See the protocol."""
        return self._branch(name, self._is_greedy)

    def branch_greedily(self) -> FleetPolicy:
        """A branch that takes the likeliest tokens."""
        return self._branch("greedy", True)

    def _branch(self, name: str, is_greedy: bool) -> FleetPolicy:
        named, seed = f"{self._name}-{name}", self._mix_seed(name)
        return FleetPolicy(self._fleet, self.tokenizer, self.sampling, named, seed, is_greedy)

    def _make_seed(self, number: int) -> int:
        return self._mix_seed(number) if number else self._seed

    def _mix_seed(self, what: object) -> int:
        mixed = hashlib.blake2b(f"{self._seed} {what}".encode(), digest_size=4).digest()
        return int.from_bytes(mixed, "little") >> 1
