"""Checks the weights that leave an engine: names, shapes, bits, parts, and the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from enginehouse.data import Batch
from enginehouse.engines.train import Outputs
from enginehouse.engines.weights import ParamMeta, WeightSource, WeightSyncError
from enginehouse.plugin import capabilities
from enginehouse.weights.parts import as_slices, check_layout, parts_of
from enginehouse_testing.check import Checks, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, same_bits
from enginehouse_testing.models import stored_tensors
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import MODELS, batch, model_path
from enginehouse_testing.rank import Rank, weights_of

Weights = dict[str, torch.Tensor]

CHECKS = Checks()


def values_of(scored: Batch | None, name: str) -> torch.Tensor | None:
    """Return a column of the result of `forward`, on the host; None except on output ranks."""
    return None if scored is None else scored.ragged(name).values.cpu()


def read(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return metadata and weights, both whole and as this rank's parts."""
    described = {}
    for model in models:
        with rank.engine(model) as engine:
            described[model] = read_source(engine.weight_source())
    return described


def read_source(source: WeightSource) -> tuple[Sequence[ParamMeta], Weights, Weights]:
    """Return metadata, whole weights, and this rank's parts; collective."""
    local = {name: tensor.detach().cpu().clone() for name, tensor in source.iter_local()}
    return source.metadata(), {name: tensor.detach().cpu().clone() for name, tensor in source.iter_full()}, local


@CHECKS.judge(read)
def weights(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """At the start the weights equal the checkpoint bit for bit; each rank yields the parts that the metadata name."""
    return larger(
        *(
            judge_weights([rank.value[model] for rank in seen], stored_tensors(model_path(model)), f"{model} model")
            for model in models
        )
    )


def judge_weights(ranks: Sequence[tuple[Sequence[ParamMeta], Weights, Weights]], right: Weights, what: str) -> Measured:
    """Compare the weights that the ranks yield with the right ones, bit for bit, and with their metadata.

    Args:
        ranks: by rank, its metadata, whole weights and own parts.
    """
    measured = []
    for rank, (metadata, full, local) in enumerate(ranks):
        where = f"{what}, rank {rank}"
        if metadata != ranks[0][0]:
            return wrong(f"{where}: metadata differ from rank 0's")
        described = [(meta.name, meta.shape, meta.dtype) for meta in metadata]
        tensors = [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in full.items()]
        if described != tensors:
            return wrong(f"{where}: iter_full must yield the parameters of the metadata, in their order")
        measured.append(same_bits(full, right, f"{where}: against the checkpoint"))
        measured.append(_judge_parts(metadata, rank, len(ranks), full, local, where))
    return larger(*measured)


def _judge_parts(
    metadata: Sequence[ParamMeta], rank: int, ranks: int, full: Weights, local: Weights, where: str
) -> Measured:
    """Compare the parts that a rank yields with the parts and the order that its metadata describe."""
    for meta in metadata:
        try:
            check_layout(meta, ranks)
        except WeightSyncError as error:
            return wrong(f"{where}: {error}")
    held = {meta.name: full[meta.name][as_slices(region)] for meta, region in parts_of(metadata, rank)}
    if list(local) != list(held):
        return wrong(f"{where}: iter_local yields {list(local)}, but the metadata describe {list(held)}")
    return same_bits(local, held, f"{where}: iter_local against the regions of its metadata")


def lend(rank: Rank) -> dict[str, Weights]:
    """Return the weights after a step, and the present content of tensors that were yielded before the step."""
    with rank.engine("tied", **TRAINING) as engine:
        lent = dict(engine.weight_source().iter_full())
        step(engine, rank.shard(engine, batch()))
        return {
            "lent": {name: tensor.detach().cpu().clone() for name, tensor in lent.items()},
            "now": weights_of(engine),
        }


@CHECKS.judge(lend, since="1.1", capability=capabilities.LENT_WEIGHTS)
def lent_weights(seen: list[Seen]) -> Measured:
    """`iter_full` yields the live tensors, so a step after the call changes them."""
    return larger(*(same_bits(result.value["lent"], result.value["now"], "yielded before a step") for result in seen))


def write(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Return weights after training and logprobs of this rank's rows; on rank 0 also the content of an export."""
    written = {}
    for model in models:
        with rank.engine(model, **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            for _ in range(2):
                step(engine, shard)
            engine.export_hf(rank.path(model))
            logprobs = values_of(engine.forward(shard.drop(["loss_mask"]), Outputs()), "logprobs")
            written[model] = (weights_of(engine), logprobs)
            if rank.context.rank == 0:
                # Score it here: the suite may not be able to read the case's directory after the act.
                rescored = Oracle(rank.path(model)).scores(batch(), masked=False)["logprobs"]
                written[f"{model} exported"] = (stored_tensors(rank.path(model)), rescored)
    return written


@CHECKS.judge(write, tolerance=1e-5)
def export(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """After training the export equals the weights bit for bit, and transformers computes the same logprobs from it as
    the engine."""
    measured = []
    for model in models:
        exported, rescored = seen[0].value[f"{model} exported"]
        for result in seen:
            bits = same_bits(exported, result.value[model][0], f"{model} model, export against weights")
            if bits.error:
                return wrong(bits.detail)
        scored = torch.cat([value[model][1] for value in outputs_of(seen)])
        measured.append(largest_difference({"logprobs": scored}, {"logprobs": rescored}))
    return larger(*measured)
