"""A rollout engine in a training engine's process: it takes nothing there and changes nothing."""

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
from enginehouse_testing.check import Measured, RolloutCheck, wrong
from enginehouse_testing.checks.rollout.reference import LOGPROB_TOLERANCE, named, of_one, serves
from enginehouse_testing.comparison import larger
from enginehouse_testing.prompts import prompts
from enginehouse_testing.replica import Drawn, Replica, soon

STEPS = 6
SEED = 5
VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE")


class Trainer:
    """What a training engine has in a process: a process group, and steps that draw from the process's seeds."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        np.random.seed(SEED)
        random.seed(SEED)
        self._model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 4))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.05)

    def step(self) -> float:
        """Train on a random batch; returns the loss, after a sum over the group."""
        scale = random.random() + np.random.random()
        loss = self._model(torch.randn(32, 16)).square().mean() * scale
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return float(total)


def process_state() -> dict[str, Any]:
    """What an engine in a process must leave as it is, by name."""
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


async def _colocates(replica: Replica) -> tuple[list[str], list[Drawn]]:
    """An engine's life between the steps of a trainer, and the same steps without it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    said: list[str] = []
    try:
        trainer = Trainer()
        alone = [trainer.step() for _ in range(STEPS)]
        trainer, beside = Trainer(), []

        async def between(what: str, call: Any) -> Any:
            beside.append(trainer.step())
            before = process_state()
            result = await soon(call)
            changed = [name for name, value in process_state().items() if value != before[name]]
            said.extend(f"{what} changed {name}" for name in changed)
            return result

        replica.engine, replica.endpoint = await between("launch", replica.launched(replica.models["tied"]))
        replica.serving = "tied"
        await between("generate", replica.draw(*prompts(4), n=2, max_tokens=8))
        await between("generate with a seed", replica.draw(*prompts(2), max_tokens=8, seed=3))
        await between("a weight update", replica.update("tied, new"))
        drawn = await between("generate", replica.draw(*prompts(3), temperature=0.0, max_tokens=8, ignore_eos=True))
        await between("shutdown", replica.engine.shutdown())
        if beside != alone:
            said.append(f"a trainer's losses beside it are {beside}, without it {alone}")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return said, drawn


@of_one
def _judge(found: tuple[list[str], list[Drawn]]) -> Measured:
    said, drawn = found
    after = named("beside a trainer, after an update", serves("tied, new", drawn))
    return larger(wrong("; ".join(dict.fromkeys(said))), after) if said else after


COLOCATES = RolloutCheck(
    name="colocates",
    since="1.1",
    capability=capabilities.COLOCATES,
    claim="In a trainer's process it leaves threads, seeds, devices and the process group as they are, and every loss",
    tolerance=LOGPROB_TOLERANCE,
    acts=(_colocates,),
    judge=_judge,
    model=None,
    fresh=True,
)
