"""CPU time of the torch rollout engine against `transformers.generate`, on the quickstart's batch.

32 prompts of 8 tokens, 8 samples each, 7 new tokens, temperature 1, one thread. Both sides run in this process and take
turns. Their seconds are process CPU time, which other programs on the machine disturb least. The engine's seconds
include its event loop, its decode thread and the logprobs that it returns; `transformers.generate` computes none.
`transformers.generate` is tried in each way that could be its fastest; the way with the smallest median counts.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.rollout import GenerateRequest, SamplingParams
from enginehouse.quiet import quiet_transformers
from enginehouse_torch.options import TorchRolloutOptions
from enginehouse_torch.rollout import TorchRolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS, PROMPT_TOKENS, SAMPLES, NEW_TOKENS = 32, 8, 8, 7
VOCABULARY = 28

Side = Callable[[], Awaitable[None]]


def measure(rounds: int = 40, warm_up: int = 5) -> dict[str, Any]:
    """Run the comparison.

    Args:
        rounds: turns of every side.
        warm_up: turns before them, which do not count.

    Returns:
        `metrics` with `generate_vs_transformers` (CPU seconds of transformers divided by ours, median over rounds),
        `generate_vs_transformers_unfused` (the same with the model's own forward pass), `generate_cpu_milliseconds`
        and `generate_tokens_per_cpu_second`; `sides` with each side's median CPU milliseconds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return asyncio.run(_measure(rounds, warm_up))
    finally:
        torch.set_num_threads(threads)


async def _measure(rounds: int, warm_up: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = _model()
    prompts = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_TOKENS))
    engines = {"enginehouse": TorchRolloutEngine(), "enginehouse, unfused": TorchRolloutEngine()}
    with tempfile.TemporaryDirectory() as path:
        with quiet_transformers():
            model.save_pretrained(Path(path))
        for name, engine in engines.items():
            options = TorchRolloutOptions(fused=name == "enginehouse")
            await engine.launch(ModelSpec(path), options, ProcessContext("rollout"))
    sides: dict[str, Side] = {name: _ours(engine, prompts) for name, engine in engines.items()}
    peers = _peers(model, prompts)
    seconds: dict[str, list[float]] = {name: [] for name in (*sides, *peers)}
    for turn in range(warm_up + rounds):
        for name, side in (sides | peers).items():
            begun = time.process_time()
            await side()
            if turn >= warm_up:
                seconds[name].append(time.process_time() - begun)
    for engine in engines.values():
        await engine.shutdown()

    best_peer = min((seconds[name] for name in peers), key=statistics.median)

    def ratio(name: str) -> float:
        return statistics.median(theirs / ours for theirs, ours in zip(best_peer, seconds[name], strict=True))

    own = statistics.median(seconds["enginehouse"])
    return {
        "metrics": {
            "generate_vs_transformers": ratio("enginehouse"),
            "generate_vs_transformers_unfused": ratio("enginehouse, unfused"),
            "generate_cpu_milliseconds": own * 1e3,
            "generate_tokens_per_cpu_second": PROMPTS * SAMPLES * NEW_TOKENS / own,
        },
        "sides": {
            name: {"CPU milliseconds, median": statistics.median(taken) * 1e3, "least": min(taken) * 1e3}
            for name, taken in seconds.items()
        },
    }


def _model() -> PreTrainedModel:
    """Return a model of the quickstart's shape with random weights: 100,480 parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            intermediate_size=192, vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=True,
            initializer_range=0.05, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).eval()  # fmt: skip


def _ours(engine: TorchRolloutEngine, prompts: torch.Tensor) -> Side:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, n=SAMPLES, ignore_eos=True)
    requests = [GenerateRequest(str(row), ids, sampling) for row, ids in enumerate(prompts.tolist())]

    async def generate() -> None:
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert sum(len(c.token_ids) for r in results for c in r.completions) == PROMPTS * SAMPLES * NEW_TOKENS

    return generate


def _peers(model: PreTrainedModel, prompts: torch.Tensor) -> dict[str, Side]:
    repeated = prompts.repeat_interleave(SAMPLES, 0)

    def side(ids: torch.Tensor, **arguments: Any) -> Side:
        mask = torch.ones_like(ids)

        async def generate() -> None:
            found = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, eos_token_id=None, **arguments,
            )  # fmt: skip
            assert found.shape == (PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS)

        return generate

    return {
        "transformers, dynamic cache": side(repeated),
        "transformers, static cache": side(repeated, cache_implementation="static"),
        "transformers, num_return_sequences": side(prompts, num_return_sequences=SAMPLES),
    }
