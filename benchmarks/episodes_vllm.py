"""Episodes of many turns on vLLM's asynchronous engine, as a user would write the loop, without enginehouse.

`episodes` starts it under the runtime's interpreter, with the same environment variables as the other side.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import time
from typing import Any

from benchmarks.dispatch_side import own_and_resident, serve
from benchmarks.episodes_tool import Tool, prompt
from benchmarks.machine import cpu_seconds, wanted_seconds_below
from benchmarks.rollout_engine_vllm import launch


class Bare:
    """vLLM's engine, and a loop of episodes on it; for `task` see `episodes.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._task, self._tool = task, Tool(task)
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None
        self._requests = itertools.count()
        self._under_way = self._most = 0

    def start(self) -> dict[str, str]:
        """Start the engine; return its description."""
        # no chunks: a seeded request whose prompt is taken in parts ends vLLM 0.32 on a CPU
        self._llm, engine = launch(self._loop, self._task, enable_chunked_prefill=False)
        return {"engine": engine}

    def greedy(self, tasks: int) -> list[list[int]]:
        """Return the tokens of the first tasks' episodes, sampled greedily."""
        return [tokens for tokens, _, _ in self._loop.run_until_complete(self._all(tasks, 0.0, 0))]

    def run(self, seed: int) -> dict[str, float]:
        """Play all episodes at once; return the figures."""
        task = self._task
        engine, own = wanted_seconds_below(os.getpid()), cpu_seconds(os.getpid())
        self._most = 0
        begun = time.perf_counter()
        found = self._loop.run_until_complete(self._all(task["episodes"] // task["samples"], 1.0, seed))
        seconds = time.perf_counter() - begun
        had, waited = wanted_seconds_below(os.getpid())
        return {
            "seconds": seconds,
            "tokens": sum(sum(mask) for _, mask, _ in found),
            "engine_cpu_seconds": had - engine[0],
            "engine_waited_seconds": waited - engine[1],
            "own_cpu_seconds": cpu_seconds(os.getpid()) - own,
            "most_at_once": self._most,
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes that only this process uses while nothing is in progress."""
        gc.collect()
        return {"controller": own_and_resident(os.getpid())[0]}

    async def _all(self, tasks: int, temperature: float, seed: int) -> list[tuple[list[int], list[bool], list[float]]]:
        samples = self._task["samples"]
        return await asyncio.gather(
            *(self._episode(number, number // samples, temperature, seed) for number in range(tasks * samples))
        )

    async def _episode(
        self, number: int, of_task: int, temperature: float, seed: int
    ) -> tuple[list[int], list[bool], list[float]]:
        """Return an episode's tokens, a mask of those that were sampled, and their logprobs."""
        self._under_way += 1
        self._most = max(self._most, self._under_way)
        turns = self._task["turns"]
        tokens = prompt(of_task, self._task["prompt_tokens"])
        mask, logprobs = [False] * len(tokens), [0.0] * len(tokens)
        for turn in range(turns):
            if turn:
                await asyncio.sleep(self._tool.seconds(number, turn - 1))
                answer = self._tool.answer(number, turn - 1)
                tokens += answer
                mask += [False] * len(answer)
                logprobs += [0.0] * len(answer)
            drawn, of_drawn = await self._draw(tokens, temperature, (seed * 10**6 + number) * turns + turn)
            tokens += drawn
            mask += [True] * len(drawn)
            logprobs += of_drawn
        self._under_way -= 1
        return tokens, mask, logprobs

    async def _draw(self, tokens: list[int], temperature: float, seed: int) -> tuple[list[int], list[float]]:
        """Return token ids and their logprobs."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=self._task["max_tokens"], ignore_eos=True, logprobs=0,
            flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        outputs = self._llm.generate(tokens_input(list(tokens)), sampling, str(next(self._requests)))
        part = [one async for one in outputs][-1].outputs[0]
        return list(part.token_ids), [part.logprobs.logprobs[begin] for begin in part.logprobs.start_indices]

    def close(self) -> None:
        """End vLLM."""
        if self._llm is not None:
            self._llm.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=argparse.FileType())
    serve(Bare(json.load(parser.parse_args().task)))
