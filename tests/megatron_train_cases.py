"""A `megatron` engine on several ranks, as its tests drive it. In a module of its own: rank processes import it."""

from __future__ import annotations

from typing import Any

import torch

from enginehouse.engines.model import ModelSpec, ProcessContext
from enginehouse.engines.train import Outputs
from enginehouse.testing.checks.train.reference import TRAINING
from enginehouse.testing.problem import POLICY, batch
from enginehouse_megatron.engine import MegatronEngine
from enginehouse_megatron.options import MegatronOptions

STEPS = 3


def trained(rank: int, world_size: int, path: str, saved: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of all tokens where this rank gives them; weights after some steps; whether a checkpoint brings them."""
    engine = MegatronEngine()
    context = ProcessContext("actor", rank, world_size, rank)
    engine.setup(ModelSpec(path=path), MegatronOptions(**TRAINING, tokens_per_microbatch=40, **options), context)
    scored = engine.forward(batch().drop(["loss_mask"]), Outputs())
    for number in range(STEPS):
        if number == STEPS - 1:
            engine.save(saved)
        engine.forward_backward(batch(), POLICY)
        engine.optim_step()
    weights = {name: tensor.clone() for name, tensor in engine.weight_source().iter_full()}
    engine.load(saved)
    engine.forward_backward(batch(), POLICY)
    engine.optim_step()
    again = dict(engine.weight_source().iter_full())
    engine.shutdown()
    return {
        "logprobs": None if scored is None else scored.ragged("logprobs").values,
        "weights": weights,
        "goes on alike": all(torch.equal(again[name], weight) for name, weight in weights.items()),
    }


def held(rank: int, world_size: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of the weights, by what it says and by what is in its model."""
    engine = MegatronEngine()
    engine.setup(ModelSpec(path=path), MegatronOptions(**options), ProcessContext("actor", rank, world_size, rank))
    source = engine.weight_source()
    found = {
        "metadata": source.metadata(),
        "local": [name for name, _ in source.iter_local()],
        "expert numbers": sum(
            parameter.numel()
            for part in engine._models
            for name, parameter in part.named_parameters()
            if ".experts." in name
        ),
    }
    engine.shutdown()
    return found
