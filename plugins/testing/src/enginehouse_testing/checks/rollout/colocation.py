"""Checks that a rollout engine in the process of a training engine leaves the state of that process unchanged."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
from typing import Any

import numpy as np
import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, prefixed, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.prompts import prompts
from enginehouse_testing.replica import ReplicaTrial, SampledCompletion, soon

STEPS = 6
SEED = 5
VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")

CHECKS = Checks(RolloutCheck, tolerance=LOGPROB_TOLERANCE)


class ToyTrainer:
    """Trains a toy model by steps that use the process's random numbers and sum over its process group."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        np.random.seed(SEED)
        random.seed(SEED)
        self._model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 4))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.05)

    def step(self) -> float:
        """Train on a random batch; return the loss, summed over the group."""
        scale = random.random() + np.random.random()
        loss = self._model(torch.randn(32, 16)).square().mean() * scale
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total)


def process_state() -> dict[str, Any]:
    """Return the state that an engine must leave unchanged in its process, by name."""
    state: dict[str, Any] = {
        "torch's threads": torch.get_num_threads(),
        "torch's threads between operations": torch.get_num_interop_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": str(torch.get_default_device()),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "the precision of matrix products": torch.get_float32_matmul_precision(),
        "torch's seed": _digest(torch.get_rng_state().numpy().tobytes()),
        "numpy's seed": _digest(pickle.dumps(np.random.get_state())),
        "Python's seed": _digest(pickle.dumps(random.getstate())),
        "the working directory": os.getcwd(),
        "the process group": torch.distributed.is_initialized() and torch.distributed.get_world_size(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
    }
    if torch.cuda.is_available():
        state["the current GPU"] = torch.cuda.current_device()
    return state | {f"${name}": os.environ.get(name) for name in VARIABLES}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


async def _colocate(replica: ReplicaTrial) -> tuple[list[str], list[SampledCompletion]]:
    """Run a trainer's steps once without the engine, and once with calls of the engine between the steps."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mistakes: list[str] = []
    try:
        trainer = ToyTrainer()
        alone = [trainer.step() for _ in range(STEPS)]
        trainer, beside = ToyTrainer(), []

        async def between(what: str, call: Any) -> Any:
            beside.append(trainer.step())
            before = process_state()
            result = await soon(call)
            changed = [name for name, value in process_state().items() if value != before[name]]
            mistakes.extend(f"{what} changed {name}" for name in changed)
            return result

        launching = replica.launch_engine(replica.models["tied"])
        replica.engine, replica.endpoint = await between("launch", launching)
        replica.serving = "tied"
        await between("generate", replica.draw(*prompts(4), n=2, max_tokens=8))
        await between("generate with a seed", replica.draw(*prompts(2), max_tokens=8, seed=3))
        await between("a weight update", replica.update("tied, new"))
        drawing = replica.draw(*prompts(3), temperature=0.0, max_tokens=8, ignore_eos=True)
        completions = await between("generate", drawing)
        await between("shutdown", replica.engine.shutdown())
        if beside != alone:
            mistakes.append(f"a trainer's losses are {beside} with the engine in its process, and {alone} without")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return mistakes, completions


@CHECKS.judge(_colocate, since="1.1", capability=capabilities.COLOCATES, model=None, fresh=True)
def colocates(result: tuple[list[str], list[SampledCompletion]]) -> Measured:
    """In a trainer's process, the engine leaves threads, seeds, devices, the process group and every loss unchanged."""
    mistakes, completions = result
    after = prefixed("beside a trainer, after an update", serves("tied, new", completions))
    return larger(wrong("; ".join(dict.fromkeys(mistakes))), after) if mistakes else after
