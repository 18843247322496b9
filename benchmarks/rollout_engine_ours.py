"""The same requests through a rollout worker, as in a run: a batch of prompts in, a batch of samples out.

`rollout_engine` starts it under the runtime's interpreter, with the same environment variables as the other side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from benchmarks.dispatch_side import serve


class Ours:
    """A rollout worker without a controller; for `task` see `rollout_engine.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._task = task
        self._loop = asyncio.new_event_loop()
        self._worker: Any = None

    def start(self) -> dict[str, str]:
        """Start the worker's engine; return its description."""
        import torch

        from enginehouse.data import Batch, Ragged
        from enginehouse.engines.model import ModelSpec, ProcessContext
        from enginehouse.roles.workers import RolloutWorker

        task = self._task
        self._prompts = Batch(
            {"prompt_ids": Ragged.from_list(task["prompts"]), "prompt_index": torch.arange(len(task["prompts"]))}
        )
        options = {name: task[name] for name in ("max_running", "max_model_tokens", "kv_cache_mib", "native")}
        self._worker = RolloutWorker.__new__(RolloutWorker)
        self._worker.context = ProcessContext("rollout", device=task["device"])  # as the controller sets it
        self._worker.__init__(task["backend"], ModelSpec(task["model"]), options)
        return {"engine": self._loop.run_until_complete(self._worker.launch())}

    def greedy(self) -> list[list[int]]:
        """Return greedy completions of the first prompts."""
        samples = self._generate(self._prompts.slice(0, 4), 1, 0.0, 0)
        return [
            samples["input_ids"][row].tolist()[len(prompt) :] for row, prompt in enumerate(self._task["prompts"][:4])
        ]

    def run(self, seed: int) -> dict[str, float]:
        """Answer all requests at once; return seconds and generated tokens."""
        begun = time.perf_counter()
        samples = self._generate(self._prompts, self._task["n"], 1.0, seed)
        seconds = time.perf_counter() - begun
        prompts = self._task["n"] * sum(map(len, self._task["prompts"]))
        return {"seconds": seconds, "tokens": len(samples["input_ids"].values) - prompts}

    def _generate(self, prompts: Any, n: int, temperature: float, seed: int) -> Any:
        from enginehouse.engines.rollout import SamplingParams

        sampling = SamplingParams(max_tokens=self._task["max_tokens"], n=n, temperature=temperature, ignore_eos=True)
        return self._loop.run_until_complete(self._worker.generate(prompts, sampling, seed))

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._loop.run_until_complete(self._worker.shutdown())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", type=argparse.FileType())
    serve(Ours(json.load(parser.parse_args().task)))
