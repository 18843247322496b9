"""Checks low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from enginehouse.data import Batch
from enginehouse.engines.train import Outputs
from enginehouse.plugin import capabilities
from enginehouse_testing.check import Checks, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train import reference
from enginehouse_testing.checks.train.outgoing import judge_weights, read_source, values_of
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, same_bits
from enginehouse_testing.models import ADAPTER, stored_tensors
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import batch
from enginehouse_testing.rank import Rank, weights_of

LORA = ADAPTER.model_dump()

CHECKS = Checks(capability=capabilities.LORA)


def _train(rank: Rank) -> dict[str, Any]:
    with rank.engine("tied", **TRAINING, lora=LORA) as engine:
        shard = rank.shard(engine, batch())
        plain = shard.drop(["loss_mask"])

        def logprobs(forward: Callable[[Batch, Outputs], Batch | None]) -> torch.Tensor | None:
            return values_of(forward(plain, Outputs()), "logprobs")

        # The base comes first, because it must leave no trace in the trained model.
        results: dict[str, Any] = {"base_at_start": logprobs(engine.forward_base), "start": logprobs(engine.forward)}
        for _ in range(3):
            step(engine, shard)
        engine.export_hf(rank.path("merged"))
        engine.export_adapter(rank.path("adapter"))
        results["weights"] = weights_of(engine)
        results["base"] = logprobs(engine.forward_base)
        results["trained"] = logprobs(engine.forward)
        if rank.context.rank == 0:
            results["exported"] = stored_tensors(rank.path("merged"))
            results["merged"] = Oracle(rank.path("merged")).scores(batch(), masked=False)["logprobs"]
            results["adapted"] = _score_adapted(rank.models["tied"], rank.path("adapter"))
        return results


def _score_adapted(model: str, adapter: str) -> torch.Tensor:
    """Return logprobs of the source model with the exported adapter, as peft applies it."""
    from peft import PeftModel

    oracle = Oracle(model)
    oracle.model = PeftModel.from_pretrained(oracle.model, adapter).eval()
    return oracle.scores(batch(), masked=False)["logprobs"]


@CHECKS.judge(_train, tolerance=1e-5)
def lora(seen: list[Seen]) -> Measured:
    """A model with a new adapter equals the original model. Once it is trained, its merged export in transformers and
    its exported adapter in peft give the same logprobs as the engine. Without the adapter it still equals the
    original."""
    first = seen[0].value
    for rank in seen:
        if (bits := same_bits(first["exported"], rank.value["weights"], "merged export against weights")).error:
            return wrong(bits.detail)
    start, trained, base, base_at_start = (
        torch.cat([value[name] for value in outputs_of(seen)]) for name in ("start", "trained", "base", "base_at_start")
    )
    untouched = reference.scores("tied", 1.0)["logprobs"]
    if float((trained - untouched).abs().max()) < 1e-3:
        return wrong("three steps changed nothing")
    compared = {
        "before training, against the oracle": (start, untouched),
        "before training, without adapters, against the oracle": (base_at_start, untouched),
        "trained, without adapters, against the oracle": (base, untouched),
        "trained, against the merged export in transformers": (trained, first["merged"]),
        "trained, against the adapter in peft": (trained, first["adapted"]),
    }
    return larger(*(Measured(largest_difference({"": a}, {"": b}).error, where) for where, (a, b) in compared.items()))


def _send(rank: Rank) -> tuple[Any, dict[str, torch.Tensor]]:
    with rank.engine("tied", **TRAINING, lora=LORA) as engine:
        step(engine, rank.shard(engine, batch()))
        engine.export_adapter(rank.path("adapter"))
        rank.meet()
        return read_source(engine.adapter_source()), stored_tensors(rank.path("adapter"))


@CHECKS.judge(_send, capability=capabilities.ADAPTER_UPDATES, since="1.1")
def adapter_updates(seen: list[Seen]) -> Measured:
    """The adapters that an update sends are those of the exported file, bit for bit."""
    return judge_weights([rank.value[0] for rank in seen], seen[0].value[1], "the adapter")
