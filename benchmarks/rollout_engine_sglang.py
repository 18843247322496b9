"""SGLang called directly, as a user would write a rollout script. It uses only enginehouse's adaptation to a CPU.

`rollout_engine` starts it under the runtime's interpreter, with the same environment variables as the other side.
Processes that SGLang starts import this module too, so that the adaptation to a CPU reaches them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from benchmarks.dispatch_side import serve
from enginehouse_sglang import on_cpu
from enginehouse_sglang.starting import CONTEXT_MARGIN

if on_cpu.is_cpu(sys.argv[1:]):
    on_cpu.adapt()


class Bare:
    """SGLang's engine, and requests to it; for `task` see `rollout_engine.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._task = task
        self._engine: Any = None

    def start(self) -> dict[str, str]:
        """Start the engine; return its description."""
        import sglang

        task = self._task
        on_cpu = {"attention_backend": "torch_native"} if task["device"] == "cpu" else {}
        self._engine = sglang.Engine(
            model_path=task["model"], dtype="float32", random_seed=0, device=task["device"],
            max_running_requests=task["max_running"], context_length=task["max_model_tokens"] + CONTEXT_MARGIN,
            max_total_tokens=task["max_running"] * (task["max_model_tokens"] + CONTEXT_MARGIN),
            enable_deterministic_inference=True, skip_tokenizer_init=True, skip_server_warmup=True,
            log_level="warning", **on_cpu, **task["native"],
        )  # fmt: skip
        return {"engine": f"sglang {sglang.__version__}"}

    def greedy(self) -> list[list[int]]:
        """Return greedy completions of the first prompts."""
        return [tokens for tokens, _ in self._drawn(self._task["prompts"][:4], 1, 0.0, 0)]

    def run(self, seed: int) -> dict[str, float]:
        """Answer all requests at once; return seconds and generated tokens."""
        begun = time.perf_counter()
        found = self._drawn(self._task["prompts"], self._task["n"], 1.0, seed)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": sum(len(tokens) for tokens, _ in found)}

    def _drawn(self, *request: Any) -> list[tuple[list[int], list[float]]]:
        """Return the result of `_all`, run on SGLang's own loop, which is quicker than asyncio's."""
        drawn: list[tuple[list[int], list[float]]] = self._engine.loop.run_until_complete(self._all(*request))
        return drawn

    async def _all(
        self, prompts: list[list[int]], n: int, temperature: float, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return token ids and their logprobs for each sample. All prompts run at once, each with its samples.

        A single list of all samples of all prompts is slower (SGLang 0.5.23 on a CPU).
        """
        calls = [self._samples(prompt, n, temperature, seed * 1_000_003 + i * n) for i, prompt in enumerate(prompts)]
        return [sample for samples in await asyncio.gather(*calls) for sample in samples]

    async def _samples(
        self, prompt: list[int], n: int, temperature: float, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return samples of a prompt, each a separate sequence, because SGLang has a seed per sequence, not per `n`."""
        sampling = [
            {
                "max_new_tokens": self._task["max_tokens"], "temperature": temperature, "ignore_eos": True,
                "sampling_seed": seed + number,
            }
            for number in range(n)
        ]  # fmt: skip
        answers = await self._engine.async_generate(
            input_ids=[prompt] * n, sampling_params=sampling, return_logprob=True
        )
        return [
            (one["output_ids"], [entry[0] for entry in one["meta_info"]["output_token_logprobs"]]) for one in answers
        ]

    def close(self) -> None:
        """End SGLang."""
        if self._engine is not None:
            self._engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=argparse.FileType())
    serve(Bare(json.load(parser.parse_args().task)))
