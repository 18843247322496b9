"""What an environment asks for tokens: a rollout fleet, with the seeds of one task."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from enginehouse.engines.rollout import GenerateRequest

if TYPE_CHECKING:
    from enginehouse.engines.rollout import Completion, GenerateResult, SamplingParams


class Draws(Protocol):
    """What a policy asks: a fleet, or what has one draw."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See `RolloutFleet.generate`."""
        ...


class FleetPolicy:
    """Implements `enginehouse.engines.environment.Policy` for one task.

    Args:
        fleet: who draws.
        tokenizer: the model's.
        sampling: how, unless a call says otherwise.
        name: begins its requests' ids.
        seed: of its first call; what others draw depends on it and on their number.
    """

    def __init__(self, fleet: Draws, tokenizer: Any, sampling: SamplingParams, name: str, seed: int):
        self.tokenizer = tokenizer
        self._fleet, self._sampling, self._name, self._seed = fleet, sampling, name, seed
        self._calls = 0

    async def generate(self, tokens: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """See the protocol."""
        (completion,) = await self.samples(tokens, 1, sampling)
        return completion

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """See the protocol."""
        number, self._calls = self._calls, self._calls + 1
        sampling = replace(sampling or self._sampling, n=n, seed=self._seed_of(number))
        result = await self._fleet.generate(GenerateRequest(f"{self._name}-{number}", tokens, sampling))
        return result.completions

    def branch(self, name: str) -> FleetPolicy:
        """See the protocol."""
        return FleetPolicy(self._fleet, self.tokenizer, self._sampling, f"{self._name}-{name}", self._mixed(name))

    def _seed_of(self, number: int) -> int:
        return self._mixed(number) if number else self._seed

    def _mixed(self, what: object) -> int:
        mixed = hashlib.blake2b(f"{self._seed} {what}".encode(), digest_size=4).digest()
        return int.from_bytes(mixed, "little") >> 1
