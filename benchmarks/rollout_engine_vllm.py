"""vLLM called directly, as a user would write a rollout script. It uses nothing of enginehouse.

`rollout_engine` starts it under the runtime's interpreter, with the same environment variables as the other side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from benchmarks.dispatch_side import serve


def launch(loop: asyncio.AbstractEventLoop, task: dict[str, Any], **on_cpu: Any) -> tuple[Any, str]:
    """Start vLLM's asynchronous engine on a loop; return the engine, and its name and version.

    Args:
        loop: event loop of the engine.
        task: see `rollout_engine.measure`.
        on_cpu: additional arguments of the engine if there is no GPU.
    """
    import vllm
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    arguments = AsyncEngineArgs(
        model=task["model"], dtype="float32", seed=0, max_num_seqs=task["max_running"],
        max_model_len=task["max_model_tokens"], kv_cache_memory_bytes=task["kv_cache_mib"] << 20,
        logprobs_mode="processed_logprobs", skip_tokenizer_init=True, disable_log_stats=True,
        **({"enforce_eager": True, **on_cpu} if task["device"] == "cpu" else {}), **task["native"],
    )  # fmt: skip

    async def launched() -> Any:
        return AsyncLLMEngine.from_engine_args(arguments)

    return loop.run_until_complete(launched()), f"vllm {vllm.__version__}"


class Bare:
    """vLLM's asynchronous engine, and requests to it; for `task` see `rollout_engine.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._task = task
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None
        self._requests = 0

    def start(self) -> dict[str, str]:
        """Start the engine; return its description."""
        self._llm, engine = launch(self._loop, self._task)
        return {"engine": engine}

    def greedy(self) -> list[list[int]]:
        """Return greedy completions of the first prompts."""
        prompts = self._task["prompts"][:4]
        return [samples[0][0] for samples in self._loop.run_until_complete(self._all(prompts, 1, 0.0, 0))]

    def run(self, seed: int) -> dict[str, float]:
        """Answer all requests at once; return seconds and generated tokens."""
        begun = time.perf_counter()
        found = self._loop.run_until_complete(self._all(self._task["prompts"], self._task["n"], 1.0, seed))
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": sum(len(tokens) for samples in found for tokens, _ in samples)}

    async def _all(
        self, prompts: list[list[int]], n: int, temperature: float, seed: int
    ) -> list[list[tuple[list[int], list[float]]]]:
        return await asyncio.gather(
            *(self._one(prompt, n, temperature, seed + 1000 * row) for row, prompt in enumerate(prompts))
        )

    async def _one(
        self, prompt: list[int], n: int, temperature: float, seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return token ids and their logprobs for each sample."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            n=n, temperature=temperature, seed=seed, max_tokens=self._task["max_tokens"], ignore_eos=True, logprobs=0,
            flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._requests += 1
        outputs = [one async for one in self._llm.generate(tokens_input(prompt), sampling, str(self._requests))]
        return [
            (list(part.token_ids), [part.logprobs.logprobs[begin] for begin in part.logprobs.start_indices])
            for part in outputs[-1].outputs
        ]

    def close(self) -> None:
        """End vLLM."""
        if self._llm is not None:
            self._llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=argparse.FileType())
    serve(Bare(json.load(parser.parse_args().task)))
