"""State that is put away and brought back."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.plugin import capabilities
from enginehouse_testing.check import Check, Measured, Seen
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, same_bits
from enginehouse_testing.problem import POLICY, batch
from enginehouse_testing.rank import Rank, weights_of


def _there_and_back(rank: Rank) -> dict[str, Any]:
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


def _judge(seen: list[Seen]) -> Measured:
    measured = []
    for one in seen:
        if (changed := same_bits(one.value["after"], one.value["before"], "after offload and onload")).error:
            return Measured(float("inf"), changed.detail)
        found = largest_difference(one.value["next"], reference.trained("tied", 2)[1])
        measured.append(Measured(found.error, f"{found.detail}, put away between gradient and step"))
    return larger(*measured)


def _free(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING) as engine:
        step(engine, rank.shard(engine, batch()))
        held = torch.cuda.memory_allocated()
        engine.offload()
        freed = torch.cuda.memory_allocated()
        engine.onload()
        return {"held": held, "offloaded": freed, "onloaded": torch.cuda.memory_allocated()}


def _judge_free(seen: list[Seen]) -> Measured:
    worst = max(one.value["offloaded"] / max(1, one.value["held"]) for one in seen)
    return Measured(worst, "part of the GPU memory that is still held once everything is offloaded")


CHECKS = (
    Check(
        name="offload",
        capability=capabilities.OFFLOAD,
        claim="Weights come back bit for bit, and a step between whose gradient and update all was put away is the "
        "oracle's",
        tolerance=1e-4,
        acts=(_there_and_back,),
        judge=_judge,
    ),
    Check(
        name="cuda_memory_freed_by_offload",
        capability=capabilities.OFFLOAD,
        claim="Offloading frees the GPU's memory, up to a twentieth (fixed workspaces of libraries)",
        tolerance=0.05,
        acts=(_free,),
        judge=_judge_free,
        device="cuda",
    ),
)
