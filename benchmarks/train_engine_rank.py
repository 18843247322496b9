"""One rank process of the training benchmark: `python -m benchmarks.train_engine_rank TASK.json`.

It builds the sides that the task names in this process, lets them take turns, and writes what rank 0 measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.train_engine_bare import BareLoop, Row, Settings

Step = Callable[[], tuple[float, float, float]]
"""Takes an optimizer step on this rank's rows; returns the summed loss, its count, and the gradient's norm."""

ENGINES = ("enginehouse_torch.train", "enginehouse_fsdp.engine")
CHECKED_STEPS = 3
"""First steps of every side, which must agree and are not timed."""
PER_GROUP = 4
"""Rows that begin with the same prompt."""


def main(task: dict[str, Any]) -> None:
    """Measure, and write `task["out"]` on rank 0."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(task["device"], rank) if task["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        found = run(task, rank, ranks, device)
        if rank == 0:
            Path(task["out"]).write_text(json.dumps(found))
        dist.barrier()
        # Sharded parameters still hold gloo's threads when the interpreter ends, which sometimes aborts the process.
        os._exit(0)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def run(task: dict[str, Any], rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return this rank's measurements; `seconds`, `checked` and `memory` are of all ranks."""
    import_everything()
    rows = draw_rows(task["rows"], task["length"], task["vocabulary"], seed=rank)
    before = memory_before(device)
    sides = {side: build(side, task, rank, ranks, device, rows) for side in task["sides"]}
    checked = {side: [over_ranks(*step(), ranks=ranks) for _ in range(CHECKED_STEPS)] for side, step in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    gc.collect()
    for number in range(task["rounds"]):
        for side in names[number % len(names) :] + names[: number % len(names)]:
            seconds[side].append(timed(sides[side], task["steps"], device))
    memory: list[int] = gather(memory_grown(device, before), ranks)
    tokens = sum(gather(sum(len(ids) for ids, _ in rows), ranks))
    return {"seconds": seconds, "checked": checked, "memory": max(memory), "tokens": tokens}


def import_everything() -> None:
    """Import what any side needs, so that no side's memory includes it."""
    for module in ("transformers.models.qwen3.modeling_qwen3", *ENGINES):
        importlib.import_module(module)


def draw_rows(rows: int, length: int, vocabulary: int, seed: int) -> list[Row]:
    """Return random rows in groups of one prompt, of up to `length` tokens, a quarter prompt; one is that long."""
    draw = random.Random(seed)
    found: list[Row] = []
    while len(found) < rows:
        prompt = [draw.randrange(1, vocabulary) for _ in range(max(1, length // 4))]
        for _ in range(min(PER_GROUP, rows - len(found))):
            size = draw.randint((length - len(prompt)) // 2, length - len(prompt)) if found else length - len(prompt)
            found.append(([*prompt, *(draw.randrange(1, vocabulary) for _ in range(size))], len(prompt)))
    return found


def build(side: str, task: dict[str, Any], rank: int, ranks: int, device: torch.device, rows: Sequence[Row]) -> Step:
    """Build a side: `fsdp`, `fsdp shared`, `torch`, `torch shared`, `bare`, `bare plain` or `bare whole`."""
    settings = Settings(budget=task["budget"])
    if side.startswith("bare"):
        sharded = side != "bare plain"
        loop = BareLoop(task["model"], settings, device, sharded=sharded, whole_logits=side == "bare whole")
        return lambda: loop.step(rows)

    from enginehouse.data import Batch, Ragged
    from enginehouse.engines.model import ModelSpec, ProcessContext
    from enginehouse.engines.train import LossSpec

    ids = Ragged.from_list([tokens for tokens, _ in rows], dtype=torch.int64)
    counted = [place >= prompt for tokens, prompt in rows for place in range(len(tokens))]
    batch = Batch({"input_ids": ids, "loss_mask": Ragged(torch.tensor(counted), ids.offsets)})
    engine = make_engine(side)
    options = {
        "lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm, "tokens_per_microbatch": settings.budget,
        "share_prompts": "auto" if side.endswith("shared") else "never",
    }  # fmt: skip
    context = ProcessContext("actor", rank=rank, world_size=ranks, local_rank=rank, device=task["device"])
    engine.setup(ModelSpec(task["model"]), options_of(side)(**options), context)
    loss = LossSpec("supervised")

    def step() -> tuple[float, float, float]:
        found = engine.forward_backward(batch, loss)["loss"]
        return found.total, found.weight, engine.optim_step()["grad_norm"]

    return step


def make_engine(side: str) -> Any:
    """Return an engine of the side's backend."""
    if side.startswith("torch"):
        from enginehouse_torch.train import TorchTrainEngine

        return TorchTrainEngine()
    from enginehouse_fsdp.engine import FSDPEngine

    return FSDPEngine()


def options_of(side: str) -> type:
    """Return the options class of the side's backend."""
    if side.startswith("torch"):
        from enginehouse_torch.options import TorchTrainOptions

        return TorchTrainOptions
    from enginehouse_fsdp.options import FSDPOptions

    return FSDPOptions


def timed(step: Step, steps: int, device: torch.device) -> float:
    """Return the seconds per step, from the first rank's start to the last rank's end."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def over_ranks(total: float, weight: float, norm: float, *, ranks: int) -> list[float]:
    """Return the mean loss over all ranks, and the norm."""
    parts = gather((total, weight), ranks)
    return [sum(total for total, _ in parts) / sum(weight for _, weight in parts), norm]


def gather(value: Any, ranks: int) -> list[Any]:
    """Return every rank's value."""
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value)
    return found


def memory_before(device: torch.device) -> int:
    """Return the bytes in use before the first side was built."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def memory_grown(device: torch.device, before: int) -> int:
    """Return the peak bytes above `before` that the process held: on the accelerator if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() - before
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * (1 if sys.platform == "darwin" else 1024) - before


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
