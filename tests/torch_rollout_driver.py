"""Drives a `TorchRolloutEngine` in tests: launch and shut down, hold the decode thread, and the oracle."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, GenerateResult, SamplingParams
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.rollout import TorchRolloutEngine

SECONDS = 60  # longest any wait in a test may take


@contextlib.asynccontextmanager
async def launched(path: str, *, dtype: str = "float32", **options: object) -> AsyncIterator[TorchRolloutEngine]:
    engine = TorchRolloutEngine()
    await engine.launch(ModelSpec(path, dtype=dtype), TorchRolloutOptions(**options), ProcessContext("rollout"))
    try:
        yield engine
    finally:
        await engine.shutdown()


async def generate(engine: TorchRolloutEngine, *prompts: Sequence[int], **sampling: object) -> list[GenerateResult]:
    """One request a prompt, all at once, with the same sampling."""
    params = SamplingParams(**sampling)
    requests = [GenerateRequest(str(index), prompt, params) for index, prompt in enumerate(prompts)]
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def generate_once(
    path: str, *prompts: Sequence[int], options: dict | None = None, **sampling: object
) -> list[GenerateResult]:
    """`generate` on an engine of its own."""

    async def run() -> list[GenerateResult]:
        async with launched(path, **(options or {})) as engine:
            return await generate(engine, *prompts, **sampling)

    return asyncio.run(run())


def random_prompts(count: int, seed: int = 0, longest: int = 12, equal: bool = False) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 30, longest if equal else rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@functools.cache
def plain_model(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logits(path: str, ids: Sequence[int]) -> torch.Tensor:
    """Logits of one sequence by the model's plain forward pass, `(tokens, vocabulary)`."""
    return plain_model(path)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def plain_logprobs(path: str, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Logprob of each token but the first given those before it."""
    logprobs = torch.log_softmax(plain_logits(path, ids) / temperature, -1)[:-1]
    return logprobs.gather(1, torch.tensor(list(ids))[1:, None])[:, 0]


def plain_greedy(path: str, prompt: Sequence[int], max_tokens: int, ends: Sequence[int] = ()) -> list[int]:
    """Greedy decoding by one full forward pass a token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens and (len(ids) == len(prompt) or ids[-1] not in ends):
        ids.append(int(plain_logits(path, ids)[-1].argmax()))
    return ids[len(prompt) :]


class Gate:
    """Holds the decode thread at the token boundary where the running completions have each used `after` tokens."""

    def __init__(self, engine: TorchRolloutEngine, after: int):
        self._left = after
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._engine = engine
        engine.loop.at_boundary = self._boundary

    def _boundary(self) -> None:
        if self._engine.loop.running and not self._opened.is_set():
            self._left -= 1
            if self._left == 0:
                self._reached.set()
                assert self._opened.wait(SECONDS)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, SECONDS)

    def open(self) -> None:
        self._opened.set()


async def posted(coroutine) -> asyncio.Task:
    """Start a call of the engine and return once it has reached the decode thread's queue."""
    task = asyncio.create_task(coroutine)
    for _ in range(3):
        await asyncio.sleep(0)
    return task
