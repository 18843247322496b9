"""Checks state that is offloaded and loaded back."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, Seen, wrong
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, located, same_bits
from enginehouse_testing.problem import POLICY, batch
from enginehouse_testing.rank import Rank, weights_of

CHECKS = Checks(capability=capabilities.OFFLOAD)


def _offload_and_onload(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        shard = rank.shard(engine, batch())
        step(engine, shard)
        before = weights_of(engine)
        engine.offload()
        engine.offload()
        engine.onload()
        engine.onload()
        after = weights_of(engine)
        engine.forward_backward(shard, POLICY)
        for tag in ("optimizer", "grads", "params"):
            engine.offload((tag,))
        for tag in ("params", "grads", "optimizer"):
            engine.onload((tag,))
        engine.optim_step()
        return {"before": before, "after": after, "next": weights_of(engine)}


@CHECKS.judge(_offload_and_onload, tolerance=1e-4)
def offload(seen: list[Seen]) -> Measured:
    """Weights come back bit for bit, and a step equals the step of the oracle even if everything was offloaded between
    gradient and update."""
    measured = []
    for result in seen:
        if (changed := same_bits(result.value["after"], result.value["before"], "after offload and onload")).error:
            return wrong(changed.detail)
        difference = largest_difference(result.value["next"], reference.trained("tied", 2)[1])
        measured.append(located(difference, ", put away between gradient and step"))
    return larger(*measured)


def _measure_memory(rank: Rank) -> float:
    """Return the fraction of the allocated GPU memory that is still allocated once everything is offloaded."""
    with rank.engine("tied", **TRAINING) as engine:
        step(engine, rank.shard(engine, batch()))
        held = torch.cuda.memory_allocated()
        engine.offload()
        offloaded = torch.cuda.memory_allocated()
        engine.onload()
        return offloaded / max(1, held)


@CHECKS.judge(_measure_memory, device="cuda", tolerance=0.05)
def cuda_memory_freed_by_offload(seen: list[Seen]) -> Measured:
    """Offloading frees the GPU's memory, except for at most a twentieth (fixed workspaces of libraries)."""
    worst = max(rank.value for rank in seen)
    return Measured(worst, "part of the GPU memory that is still held once everything is offloaded")
