"""Checks that an engine computes in bfloat16, on the CPU and, if there is one, on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginehouse.engines.train import Outputs
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.outgoing import values_of
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import mismatch
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch, model_path
from enginehouse_testing.rank import Rank, weights_of

TOLERANCE = 0.06
"""bfloat16 keeps 8 bits, a relative rounding error of at most 2^-9 = 0.002 per operation. A logit of these models comes
from about thirty roundings in random directions: about 0.002 * sqrt(30) = 0.01 of its size, and logits reach several
units. The check measures the root mean square over tokens, because the largest of 200 is three times that."""


SMALL: dict[str, Any] = {**TRAINING, "lr": 1e-5, "warmup_steps": 0, "total_steps": 100}
STEPS = 10
"""Number of steps. A bfloat16 weight of usual size loses even all of them together."""
LEAST_PART = 0.7
"""Smallest accepted part of the float32 oracle's weight change.

Engines that add steps up in float32, from the checkpoint's float32 weights, make nearly all of it, because roundings of
many weights cancel. Less than half of it is made if steps are rounded to bfloat16 one by one, and also if they are
added to weights that were rounded as they were loaded: each weight then begins in the middle of what rounds to it."""

CHECKS = Checks(capability=capabilities.HALF_PRECISION, tolerance=TOLERANCE)


def _run(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", dtype="bfloat16", **SMALL) as engine:
        shard = rank.shard(engine, batch())
        logprobs = values_of(engine.forward(shard.drop(["loss_mask"]), Outputs()), "logprobs")
        before = weights_of(engine)
        for _ in range(STEPS):
            step(engine, shard)
        return {"logprobs": logprobs, "before": before, "after": weights_of(engine)}


@functools.cache
def _oracle_way() -> dict[str, torch.Tensor]:
    """Return the change of the float32 oracle's weights in the same steps."""
    oracle = Oracle(model_path("tied"))
    before = oracle.weights()
    oracle.train(batch(), STEPS, SMALL)
    return {name: weight - before[name] for name, weight in oracle.weights().items()}


def _part_of_way(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """Return how far the weights moved in the direction of the oracle's change, as a fraction of that change."""
    way = _oracle_way()
    along = sum(float(((after[name].float() - before[name].float()) * w).sum()) for name, w in way.items())
    return along / sum(float(w.square().sum()) for w in way.values())


@CHECKS.judge(_run)
def half_precision(seen: list[Seen]) -> Measured:
    """In bfloat16, logprobs are close to the logprobs of the float32 oracle, small steps add up, and sent weights are
    bfloat16."""
    for rank in seen:
        for name, weight in rank.value["after"].items():
            if weight.is_floating_point() and weight.dtype != torch.bfloat16:
                return wrong(f"{name} must leave in bfloat16, not {weight.dtype}")
        if difference := mismatch(rank.value["after"], _oracle_way()):
            return wrong(difference)
        part = _part_of_way(rank.value["before"], rank.value["after"])
        if not LEAST_PART <= part <= 2 - LEAST_PART:
            return wrong(
                f"{STEPS} small steps made {part:.2f} of the oracle's change: are they or the weights rounded?"
            )
    logprobs = torch.cat([value["logprobs"] for value in outputs_of(seen)])
    right = reference.scores("tied", 1.0)["logprobs"]
    error = float((logprobs - right).square().mean().sqrt())
    detail = "root mean square of the logprobs' error, in nats"
    return Measured(error if error > 0 else float("inf"), detail + ("" if error else ": none, so it is not bfloat16"))


@CHECKS.judge(_run, device="cuda")
def half_precision_cuda(seen: list[Seen]) -> Measured:
    """On GPUs, over nccl, bfloat16 logprobs are close to the logprobs of the oracle, small steps add up, and weights
    are bfloat16."""
    return half_precision(seen)
