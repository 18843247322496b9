"""A run's workers, which also note when an update's bytes left and when they were staged."""

from __future__ import annotations

import asyncio
import itertools
import time

import torch

from enginehouse.controller import register
from enginehouse.engines.rollout import GenerateRequest, PauseMode, SamplingParams
from enginehouse.engines.weights import ArrivedSums
from enginehouse.roles.workers import RolloutWorker, TrainWorker
from enginehouse.weights.receiver import Switched

CHANGE = 1.0 + 2.0**-20
"""Factor of every weight between updates, so that no old weight passes for a new one."""


class TimedTrainWorker(TrainWorker):
    """A training rank that notes when it began to send."""

    _copies: list[torch.Tensor]

    def send_weights(self, version: int, deadline_seconds: float) -> dict[str, str]:
        """See `TrainWorker`."""
        self._began = time.monotonic()
        return super().send_weights(version, deadline_seconds)

    @register
    async def began(self) -> float:
        """Return the start of the last `send_weights`, in seconds of a clock that all processes of the host share."""
        return self._began

    @register
    def change(self) -> None:
        """Change every weight a little."""
        with torch.no_grad():
            for tensor in self._own():
                tensor.mul_(CHANGE)

    @register
    def copy_seconds(self, fresh: bool) -> float:
        """Return the seconds of a plain copy of this rank's weights, into memory in use or into fresh memory."""
        if not hasattr(self, "_copies"):
            self._copies = [tensor.clone() for tensor in self._own()]
        own = self._own()
        begun = time.perf_counter()
        if fresh:
            kept = []  # so that no tensor gets the memory of the previous one
            for tensor in own:
                kept.append(torch.empty_like(tensor).copy_(tensor))
        else:
            for copy, tensor in zip(self._copies, own, strict=True):
                copy.copy_(tensor)
        return time.perf_counter() - begun

    def _own(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self.engine.weight_source().iter_local()]


class TimedRolloutWorker(RolloutWorker):
    """A replica that notes when an update was staged and when it was served."""

    _load_seconds = 0.0

    async def receive_weights(self, version: int, deadline_seconds: float, pause: PauseMode = "wait") -> ArrivedSums:
        """See `RolloutWorker`."""
        sums = await super().receive_weights(version, deadline_seconds, pause)
        self._staged = time.monotonic()
        return sums

    @register(urgent=True)
    async def staged(self) -> float:
        """Return the time when the last update was completely staged, by the same clock."""
        return self._staged

    async def commit_weights(self, version: int) -> Switched:
        """See `RolloutWorker`."""
        begun = time.monotonic()
        switched = await super().commit_weights(version)
        self._commit_seconds = time.monotonic() - begun
        return switched

    @register
    async def commit_seconds(self) -> float:
        """Return the duration of the last switch."""
        return self._commit_seconds

    @register
    async def time_loads(self) -> None:
        """Time the engine's own loads from now on, if it loads what was staged in a separate step, as vLLM does."""
        load = getattr(self.engine._weights, "_load", None)
        if load is not None:

            async def timed(*args: object) -> None:
                begun = time.monotonic()
                await load(*args)
                self._load_seconds = time.monotonic() - begun

            self.engine._weights._load = timed

    @register
    async def load_seconds(self) -> float:
        """Return the duration of the engine's own load in the last switch."""
        return self._load_seconds

    @register
    async def forget_staging(self) -> None:
        """Pause for whole updates from now on, as for an engine that does not declare `stages_while_generating`."""
        self.weights._stages_while_generating = False

    @register
    async def begin_load(self, requests: int, tokens: int) -> None:
        """Keep this many requests in progress until `end_load`, with this many tokens each on average. Their lengths
        differ, so that responses do not all end at once."""
        self._ended: list[tuple[float, int]] = []
        self._load = [asyncio.create_task(self._generate_again(number, tokens)) for number in range(requests)]

    async def _generate_again(self, number: int, tokens: int) -> None:
        for count in itertools.count():
            length = 1 + (3 * number + 5 * count) % (2 * tokens - 1)
            sampling = SamplingParams(max_tokens=length, ignore_eos=True)
            prompt = [3 + (number * 97 + count * 31) % 200, *range(4, 20)]
            result = await self.requests.begin(GenerateRequest(f"load-{number}-{count}", prompt, sampling))
            self._ended.append((time.monotonic(), sum(len(one.token_ids) for one in result.completions)))

    @register(urgent=True)
    async def ended(self) -> list[tuple[float, int]]:
        """Return when each response ended, and its number of tokens."""
        return self._ended

    @register
    async def end_load(self) -> None:
        """End the requests that `begin_load` began."""
        for task in self._load:
            task.cancel()
        await asyncio.gather(*self._load, return_exceptions=True)
