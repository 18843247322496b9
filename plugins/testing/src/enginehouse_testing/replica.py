"""One replica of a rollout engine under test: the worker that runs a check's act, and the trial that an act gets.

It runs under the interpreter of the engine's runtime, so this module may import only what comes with core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from enginehouse_testing.models import ADAPTER, stored_adapter, stored_tensors

T = TypeVar("T")

WAIT_SECONDS = 120.0
"""Longest wait for anything that an engine has to do at once."""

USERS_TOKENS = 128
"""Maximum length in tokens of a sequence of a user's model. A layout's cache may be too small for the model's own
limit."""

CHUNK_PARAMETERS = 2
"""Number of parameters that arrive together in an update."""


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion as plain data; `first` and `last` are the weight versions of its first and last token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reason: str
    first: int
    last: int


@dataclass(slots=True)
class ReplicaTrial:
    """Gives an act a launched engine, and passes requests and weights to it.

    Attributes:
        models: directories of the tiny models, by name.
        model: name or directory of the model with which this replica was launched.
        directory: folder that is empty when the act begins, and is removed after the act.
        endpoint: result of the launch.
        serving: name of the model whose weights the engine serves.
        version: newest weight version that the engine was sent.
        requests: number of requests made; the id of the newest is `certify-<requests>`.
        newest: newest request of the act.
    """

    record: RolloutBackend
    layout: Layout
    context: ProcessContext
    models: Mapping[str, str]
    model: str | None
    dtype: Any = "float32"
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
        self.engine, self.endpoint = await self.launch_engine(self.models.get(self.model, self.model))
        self.serving = self.model

    async def launch_engine(self, path: str) -> tuple[RolloutEngine, Endpoint]:
        """Launch another engine with the model in a directory."""
        limit = {} if self.model in (None, *self.models) else {"max_model_tokens": USERS_TOKENS}
        options = resolve(self.record.options)(**{**limit, **self.layout.options})
        engine: RolloutEngine = resolve(self.record.engine)()
        context = replace(self.context, takes_turns=capabilities.SLEEP in self.record.capabilities)
        model = ModelSpec(path=path, dtype=self.dtype, adapter=ADAPTER if stored_adapter(path) else None)
        return engine, await engine.launch(model, options, context)

    async def at_rest(self) -> None:
        """Abort and resume, and serve the weights of `model`. Every act finds the replica in this state."""
        if self.model is None:
            return
        await soon(self.engine.abort())
        if (await soon(self.engine.health())).paused:
            await soon(self.engine.resume())
        if self.serving != self.model:
            await self.update(self.model)

    def processes(self) -> list[int]:
        """Return the ids of the running processes that the engine has started."""
        return sorted(_children() - self._others) if self.model is not None else []

    # Requests

    async def request(self, prompt: Sequence[int], **sampling: Any) -> GenerateResult:
        """Make one request. Leave the seed out if the backend does not declare that it supports seeds."""
        self.requests += 1
        if capabilities.SEED not in self.record.capabilities:
            sampling.pop("seed", None)
        request = GenerateRequest(f"certify-{self.requests}", list(prompt), SamplingParams(**sampling))
        self.newest = request
        return await soon(self.engine.generate(request))

    async def draw(self, *prompts: Sequence[int], **sampling: Any) -> list[SampledCompletion]:
        """Request completions of some prompts at once; return all of them in order."""
        results = await asyncio.gather(*(self.request(prompt, **sampling) for prompt in prompts))
        return [
            completion
            for prompt, result in zip(prompts, results, strict=True)
            for completion in sampled(prompt, result)
        ]

    async def start_request(self, prompt: Sequence[int], **sampling: Any) -> asyncio.Task[GenerateResult]:
        """Start a request, and return once the engine has generated some of its tokens. This is certain once a shorter
        request, which was made later, has ended."""
        running = asyncio.create_task(self.request(prompt, **sampling))
        await asyncio.sleep(0)
        await self.request([3], temperature=0.0, max_tokens=2, ignore_eos=True)
        return running

    async def until(self, holds: Callable[[Health], bool], what: str) -> Health:
        """Return the first answer of `health` that fulfils a condition."""

        async def ask() -> Health:
            while not holds(health := await self.engine.health()):
                await asyncio.sleep(0)
            return health

        try:
            return await soon(ask())
        except TimeoutError as error:
            raise AssertionError(f"health never reported the state {what!r}: {await self.engine.health()}") from error

    # Weights

    def tensors(self, model: str) -> dict[str, torch.Tensor]:
        """Return a model's adapter, or its weights if it has none, as a training engine sends them: by name, in the
        order of the checkpoint."""
        return stored_adapter(self.models[model]) or stored_tensors(self.models[model])

    async def start(self, tensors: Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Announce weights under the next version, or under `version`. Return the version."""
        if version is None:
            self.version = version = self.version + 1
        await soon(self.engine.start_weight_update(WeightUpdate(version, announced(tensors))))
        return version

    async def stage(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send weights in chunks whose buffers are overwritten after each call, as a transport does."""
        for chunk in chunks(tensors):
            await soon(self.engine.update_weights(WeightChunk(chunk)))
            for _, buffer in chunk:
                buffer.fill_(float("nan"))

    async def update(self, model: str, pause: PauseMode | None = "wait") -> int:
        """Serve another model's weights as the controller does; return the version.

        Args:
            model: name of the model.
            pause: treatment of running requests; None: the engine is paused already.
        """
        tensors = self.tensors(model)
        if pause is not None:
            await soon(self.engine.pause(pause))
        version = await self.start(tensors)
        await self.stage(tensors)
        await soon(self.engine.finish_weight_update(version))
        self.serving = model
        await soon(self.engine.resume())
        return version


async def soon(call: Awaitable[T]) -> T:
    """Await a call that must not take longer than `WAIT_SECONDS`."""
    return await asyncio.wait_for(call, WAIT_SECONDS)


def sampled(prompt: Sequence[int], result: GenerateResult) -> Iterator[SampledCompletion]:
    """Yield a result's completions as plain data."""
    for completion in result.completions:
        yield SampledCompletion(
            list(prompt),
            [int(token) for token in completion.token_ids],
            [float(logprob) for logprob in completion.logprobs],
            completion.finish_reason,
            completion.first_version,
            completion.last_version,
        )


def chunks(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield copies of weights, a few at a time."""
    items = list(tensors.items())
    for first in range(0, len(items), CHUNK_PARAMETERS):
        yield [(name, tensor.clone()) for name, tensor in items[first : first + CHUNK_PARAMETERS]]


def _children() -> set[int]:
    """Return the ids of all processes that this process started, directly or not, except Python's own resource
    trackers, which end with it."""
    import psutil

    running = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            tracks = any("resource_tracker" in word for word in child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not tracks:
                running.add(child.pid)
    return running


class ReplicaUnderTest(Worker):
    """Runs acts on one replica, which is launched when first needed and kept until `forget`."""

    def __init__(self) -> None:
        self._replica: ReplicaTrial | None = None
        self._used_up = False

    @register
    async def act(
        self, record: RolloutBackend, check: RolloutCheck, layout: Layout, models: dict[str, str], directory: str
    ) -> Seen:
        """Run a check's act."""
        torch.manual_seed(0)
        if self._replica is None:
            replica = ReplicaTrial(record, layout, self.context, models, check.model, check.dtype)
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
            raise EnginehouseError(f"{type(error).__name__}: {error} (newest request: {replica.newest})") from error

    @register
    async def forget(self) -> bool:
        """End the engine.

        Returns:
            True if this process may launch another engine: engines with their own processes may not allow it.
        """
        replica, self._replica = self._replica, None
        if replica is not None and replica.model is not None:
            await soon(replica.engine.shutdown())
        return not self._used_up

    @register
    async def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Return the versions of Python and of the distributions that are installed here."""
        return {"python": platform.python_version()} | installed_versions(names)

    async def shutdown(self) -> None:
        """End the engine."""
        await self.forget()


def kill_this_process() -> None:
    """Kill this process, as an engine that runs in it might."""
    os.kill(os.getpid(), 9)
