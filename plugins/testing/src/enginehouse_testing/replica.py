"""One replica of a rollout engine under test: the worker that runs a check's act, and what an act is given.

It runs under the interpreter of the engine's runtime: what is imported here, core must bring.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from enginehouse.controller import Worker, register
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import (
    Endpoint,
    GenerateRequest,
    GenerateResult,
    Health,
    PauseMode,
    RolloutEngine,
    SamplingParams,
)
from enginehouse.engines.weights import WeightChunk, WeightUpdate
from enginehouse.errors import EnginehouseError
from enginehouse.plugin import Layout, RolloutBackend, capabilities, resolve
from enginehouse.plugin.requirements import installed_versions
from enginehouse_testing.check import RolloutCheck, Seen
from enginehouse_testing.link import announced

T = TypeVar("T")

WAIT_SECONDS = 120.0
"""Longest wait for anything an engine has to do at once."""

CHUNK_PARAMETERS = 2
"""Parameters that arrive together in an update."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion, as plain data.

    Attributes:
        prompt: the prompt's ids.
        tokens: generated ids.
        logprobs: one for each of them.
        reason: why it ended.
        first: weight version of its first token.
        last: weight version of its last token.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reason: str
    first: int
    last: int


@dataclass(slots=True)
class Replica:
    """What an act is given: a launched engine, and how requests and weights are handed to it.

    Attributes:
        record: the backend under test.
        layout: its options.
        context: this process's place.
        models: directories of the tiny models, by name.
        model: the one this replica was launched with.
        directory: empty at the act's begin, removed after it.
        engine: the engine.
        endpoint: what its launch returned.
        serving: name of the model whose weights it serves.
        version: newest weight version it was sent.
        requests: how many were made; the newest is `certify-<requests>`.
        newest: of the requests of the act.
    """

    record: RolloutBackend
    layout: Layout
    context: ProcessContext
    models: Mapping[str, str]
    model: str | None
    directory: str = ""
    engine: RolloutEngine = field(init=False)
    endpoint: Endpoint = field(init=False)
    serving: str = field(default="", init=False)
    version: int = field(default=0, init=False)
    _others: frozenset[int] = field(default=frozenset(), init=False)
    requests: int = field(default=0, init=False)
    newest: GenerateRequest | None = field(default=None, init=False)

    # The engine's life

    async def launch(self) -> None:
        """Launch the engine with `model`."""
        if self.model is None:
            return
        self._others = frozenset(_children())
        self.engine, self.endpoint = await self.launched(self.models[self.model])
        self.serving = self.model

    async def launched(self, path: str) -> tuple[RolloutEngine, Endpoint]:
        """Launch another engine, with the model in a directory."""
        options = resolve(self.record.options)(**self.layout.options)
        engine: RolloutEngine = resolve(self.record.engine)()
        context = replace(self.context, takes_turns=capabilities.SLEEP in self.record.capabilities)
        return engine, await engine.launch(ModelSpec(path=path, dtype="float32"), options, context)

    async def at_rest(self) -> None:
        """Nothing runs, nothing is paused, and the weights are those of `model`: how every act finds the replica."""
        if self.model is None:
            return
        await soon(self.engine.abort())
        if (await soon(self.engine.health())).paused:
            await soon(self.engine.resume())
        if self.serving != self.model:
            await self.update(self.model)

    def processes(self) -> list[int]:
        """Ids of the processes that the engine has started and that still run."""
        return sorted(_children() - self._others) if self.model is not None else []

    # Requests

    async def request(self, prompt: Sequence[int], **sampling: Any) -> GenerateResult:
        """Make one request, without a seed where the backend does not declare that it takes any."""
        self.requests += 1
        if capabilities.SEED not in self.record.capabilities:
            sampling.pop("seed", None)
        request = GenerateRequest(f"certify-{self.requests}", list(prompt), SamplingParams(**sampling))
        self.newest = request
        return await soon(self.engine.generate(request))

    async def draw(self, *prompts: Sequence[int], **sampling: Any) -> list[Drawn]:
        """All completions of some prompts, handed over at once, in order."""
        results = await asyncio.gather(*(self.request(prompt, **sampling) for prompt in prompts))
        return [one for prompt, result in zip(prompts, results, strict=True) for one in drawn(prompt, result)]

    async def under_way(self, prompt: Sequence[int], **sampling: Any) -> asyncio.Task[GenerateResult]:
        """A request that has generated some tokens: a shorter one that came after it has ended."""
        running = asyncio.create_task(self.request(prompt, **sampling))
        await asyncio.sleep(0)
        await self.request([3], temperature=0.0, max_tokens=2, ignore_eos=True)
        return running

    async def until(self, holds: Callable[[Health], bool], what: str) -> Health:
        """The first answer of `health` of which something holds."""

        async def asked() -> Health:
            while not holds(health := await self.engine.health()):
                await asyncio.sleep(0)
            return health

        try:
            return await soon(asked())
        except TimeoutError as error:
            raise AssertionError(f"{what} was never so: {await self.engine.health()}") from error

    # Weights

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        """A model's weights, as a training engine sends them: by the names and in the order of the checkpoint."""
        from safetensors.torch import load_file

        found: dict[str, torch.Tensor] = {}
        for file in sorted(Path(self.models[model]).glob("*.safetensors")):
            found |= load_file(str(file))
        return found

    async def start(self, tensors: Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Announce weights under the next version, or a given one; returns it."""
        if version is None:
            self.version = version = self.version + 1
        await soon(self.engine.start_weight_update(WeightUpdate(version, announced(tensors))))
        return version

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send weights in chunks whose buffers are overwritten after each call, as those of a transport are."""
        for chunk in chunks(tensors):
            await soon(self.engine.update_weights(WeightChunk(chunk)))
            for _, buffer in chunk:
                buffer.fill_(float("nan"))

    async def update(self, model: str, pause: PauseMode | None = "wait") -> int:
        """Serve another model's weights, as the controller does it; returns the version. None: it is paused already."""
        tensors = self.tensors(model)
        if pause is not None:
            await soon(self.engine.pause(pause))
        version = await self.start(tensors)
        await self.stage(tensors)
        await soon(self.engine.finish_weight_update(version))
        self.serving = model
        await soon(self.engine.resume())
        return version


async def soon(what: Awaitable[T]) -> T:
    """Await something that must not take longer than `WAIT_SECONDS`."""
    return await asyncio.wait_for(what, WAIT_SECONDS)


def drawn(prompt: Sequence[int], result: GenerateResult) -> Iterator[Drawn]:
    """A result's completions as plain data."""
    for one in result.completions:
        yield Drawn(
            list(prompt),
            [int(token) for token in one.token_ids],
            [float(logprob) for logprob in one.logprobs],
            one.finish_reason,
            one.first_version,
            one.last_version,
        )


def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Weights a few at a time, each a copy."""
    items = list(tensors.items())
    for first in range(0, len(items), CHUNK_PARAMETERS):
        yield [(name, tensor.clone()) for name, tensor in items[first : first + CHUNK_PARAMETERS]]


def _children() -> set[int]:
    """Ids of this process's children and theirs, without Python's own resource trackers, which end with it."""
    import psutil

    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and not any(
                "resource_tracker" in word for word in child.cmdline()
            ):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


class ReplicaUnderTest(Worker):
    """Runs acts on one replica, launched when it is first needed and kept until it is to be forgotten."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        self._used_up = False

    @register
    async def act(
        self, record: RolloutBackend, check: RolloutCheck, layout: Layout, models: dict[str, str], directory: str
    ) -> Seen:
        """Run a check's act."""
        torch.manual_seed(0)
        if self._replica is None:
            replica = Replica(record, layout, self.context, models, check.model)
            await replica.launch()
            self._replica = replica
            self._used_up = self._used_up or bool(replica.processes())
        replica = self._replica
        await replica.at_rest()
        replica.directory, replica.newest = directory, None
        if check.breaks:
            self._replica = None
        try:
            return Seen(0, 1, True, await check.acts[0](replica))
        except Exception as error:
            if replica.newest is None:
                raise
            raise EnginehouseError(f"{type(error).__name__}: {error} (the act's newest: {replica.newest})") from error

    @register
    async def forget(self) -> bool:
        """End the engine.

        Returns:
            Whether another may be launched in this process: engines with processes of their own need not stand that.
        """
        replica, self._replica = self._replica, None
        if replica is not None and replica.model is not None:
            await soon(replica.engine.shutdown())
        return not self._used_up

    @register
    async def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Versions of Python and of those distributions that are installed here."""
        return {"python": platform.python_version()} | installed_versions(names)

    async def shutdown(self) -> None:
        """End the engine."""
        await self.forget()


def end_this_process() -> None:
    """As an engine in this process dies."""
    os.kill(os.getpid(), 9)
