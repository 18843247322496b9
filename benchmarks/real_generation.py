"""Generation alone: CPU seconds of the torch rollout engine against `transformers.generate`, on the sums' model.

Both sides run in this process on one thread and take turns, as in `benchmarks.generate`. There are two batches: 8
prompts of 8 samples with 12 new tokens each, as in the short runs of `benchmarks.real`; and 16 rows of 12 to 512
tokens, most of them short. No response ends by itself. `transformers.generate` continues until its longest row has
ended, as it does for its users.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare_real import Padded, render
from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, SamplingParams
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.rollout import TorchRolloutEngine

SHORT_TOKENS, PROMPTS, SAMPLES = 12, 8, 8
MIXED_TOKENS = (12, 16, 20, 24, 28, 36, 44, 56, 68, 84, 104, 132, 172, 232, 340, 512)
MIXED_ROUNDS = 2
"""Maximum turns of the mixed batch, each of which takes minutes."""


def compare_generation(model: Path, data: Path, rounds: int) -> dict[str, float]:
    """Return `generation_vs_transformers`, `generation_vs_transformers_mixed`, and our tokens per CPU second.

    Args:
        model: directory of a chat model.
        data: file with a prompt, as messages, on each line.
        rounds: turns of each side on the short batch.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return asyncio.run(_compare(model, data, rounds))
    finally:
        torch.set_num_threads(threads)


async def _compare(path: Path, data: Path, rounds: int) -> dict[str, float]:
    from benchmarks.bare_grpo import load

    model, tokenizer = load(path)
    conversations = [json.loads(line)["prompt"] for line, _ in zip(data.open(), range(len(MIXED_TOKENS)), strict=False)]
    prompts = render(tokenizer, conversations)
    engine = TorchRolloutEngine()
    await engine.launch(ModelSpec(str(path)), TorchRolloutOptions(), ProcessContext("rollout"))
    short = Padded(prompts.ids[:PROMPTS], prompts.mask[:PROMPTS])
    metrics: dict[str, float] = {}
    for suffix, batch, lengths, samples, turns in (
        ("", short, [SHORT_TOKENS] * PROMPTS, SAMPLES, rounds),
        ("_mixed", prompts, MIXED_TOKENS, 1, min(rounds, MIXED_ROUNDS)),
    ):
        ours = await _time(_generate(engine, batch, lengths, samples), turns)
        theirs = await _time(_generate_by_transformers(model, batch.repeat(samples), lengths, samples), turns)
        metrics[f"generation_vs_transformers{suffix}"] = theirs / ours
        metrics[f"generation_tokens_per_cpu_second{suffix}"] = sum(lengths) * samples / ours
    await engine.shutdown()
    return metrics


async def _time(generate: Callable[[], Awaitable[None]], rounds: int) -> float:
    """Return the median CPU seconds of this process for one call."""
    seconds = []
    for _ in range(rounds):
        begun = time.process_time()
        await generate()
        seconds.append(time.process_time() - begun)
    return statistics.median(seconds)


def _generate(
    engine: TorchRolloutEngine, prompts: Padded, lengths: Sequence[int], samples: int
) -> Callable[[], Awaitable[None]]:
    requests = [
        GenerateRequest(
            str(row), ids[mask.bool()].tolist(), SamplingParams(max_tokens=length, n=samples, ignore_eos=True)
        )
        for row, (ids, mask, length) in enumerate(zip(prompts.ids, prompts.mask, lengths, strict=True))
    ]

    async def generate() -> None:
        results = await asyncio.gather(*map(engine.generate, requests))
        drawn = [len(completion.token_ids) for result in results for completion in result.completions]
        assert sum(drawn) == samples * sum(lengths)

    return generate


def _generate_by_transformers(
    model: Any, prompts: Padded, lengths: Sequence[int], samples: int
) -> Callable[[], Awaitable[None]]:
    from transformers import StoppingCriteria

    limits = torch.tensor([length for length in lengths for _ in range(samples)])

    class EachRowsLimit(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **others: object) -> torch.Tensor:
            return torch.as_tensor(input_ids.shape[1] - prompts.ids.shape[1] >= limits)

    async def generate() -> None:
        tokens = model.generate(
            prompts.ids, attention_mask=prompts.mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0, stopping_criteria=[EachRowsLimit()],
        )  # fmt: skip
        assert tokens.shape[1] == prompts.ids.shape[1] + max(lengths)

    return generate
