"""Critics: a model with a value head."""

from __future__ import annotations

import functools
from typing import Any

import torch

from enginehouse.engines.train import Outputs
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Check, Measured, Seen, outputs_of
from enginehouse_testing.checks.train.reference import STEPS, TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import MODELS, SQUARED_ERROR, batch, model_path
from enginehouse_testing.rank import Rank, weights_of

HEAD = "value_head.weight"


def _train(rank: Rank) -> dict[str, Any]:
    found = {}
    for model in MODELS:
        with rank.engine(model, head="value", **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            before = weights_of(engine)
            scored = engine.forward(shard, Outputs(logprobs=False, values=True))
            for _ in range(STEPS):
                step(engine, shard, SQUARED_ERROR)
            values = None if scored is None else scored.ragged("values").values.cpu()
            found[model] = (before, values, weights_of(engine))
    return found


@functools.lru_cache(maxsize=8)
def _right(model: str, head: tuple[float, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    oracle = Oracle(model_path(model), torch.tensor(head)[None])
    values = oracle.scores(batch())["values"]
    oracle.train(batch(), STEPS, TRAINING)
    return values, oracle.weights()


def _judge(seen: list[Seen]) -> Measured:
    measured = []
    for model in MODELS:
        head = seen[0].value[model][0].get(HEAD)
        if head is None:
            return Measured(float("inf"), f"{model} model: weights hold no {HEAD}")
        values, weights = _right(model, tuple(head[0].tolist()))
        found = torch.cat([value[model][1] for value in outputs_of(seen)])
        # An error of the values counts tenfold: their tolerance is 1e-5.
        one = largest_difference({"values": found}, {"values": values})
        measured.append(Measured(10 * one.error, f"{one.detail} before training, times 10; {model} model"))
        for rank, of_rank in enumerate(seen):
            two = largest_difference(of_rank.value[model][2], weights)
            measured.append(Measured(two.error, f"{two.detail} after training; {model} model, rank {rank}"))
    return larger(*measured)


CHECKS = (
    Check(
        name="value_head",
        capability=capabilities.VALUE_HEAD,
        claim=f"Values (to 1e-5), and weights after {STEPS} steps on squared errors, are the oracle's",
        tolerance=1e-4,
        acts=(_train,),
        judge=_judge,
    ),
)
