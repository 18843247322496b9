"""Weights as they leave: names, shapes, bits, parts, and the export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from enginehouse.engines.train import Outputs
from enginehouse.engines.weights import ParamMeta, WeightSyncError
from enginehouse.weights.parts import as_slices, check_layout, parts_of
from enginehouse_testing.check import EXACT, PROTOCOL, Check, Measured, Seen, outputs_of, wrong
from enginehouse_testing.checks.train.reference import TRAINING
from enginehouse_testing.checks.train.training import step
from enginehouse_testing.comparison import larger, largest_difference, same_bits
from enginehouse_testing.oracle import Oracle
from enginehouse_testing.problem import MODELS, batch, model_path
from enginehouse_testing.rank import Rank, weights_of

Weights = dict[str, torch.Tensor]


def stored_tensors(directory: str) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(str(file))
    return found


def read(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Metadata and weights, whole and this rank's parts."""
    found = {}
    for model in models:
        with rank.engine(model) as engine:
            source = engine.weight_source()
            local = {name: tensor.detach().cpu().clone() for name, tensor in source.iter_local()}
            found[model] = (source.metadata(), weights_of(engine), local)
    return found


def judge_weights(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """Against the checkpoint's."""
    measured = [Measured(0.0)]
    for model in models:
        right = stored_tensors(model_path(model))
        first = seen[0].value[model][0]
        for rank, one in enumerate(seen):
            metadata, full, _ = one.value[model]
            where = f"{model} model, rank {rank}"
            if metadata != first:
                return Measured(float("inf"), f"{where}: metadata differ from rank 0's")
            described = [(meta.name, meta.shape, meta.dtype) for meta in metadata]
            given = [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in full.items()]
            if described != given:
                return Measured(float("inf"), f"{where}: iter_full does not give what metadata say, in their order")
            measured.append(same_bits(full, right, f"{where}: against the checkpoint"))
            measured.append(_parts(metadata, rank, len(seen), full, one.value[model][2], where))
    return larger(*measured)


def _parts(metadata: Sequence[ParamMeta], rank: int, ranks: int, full: Weights, local: Weights, where: str) -> Measured:
    """Whether what a rank gives as its own is what the metadata say it holds, and in their order."""
    for meta in metadata:
        try:
            check_layout(meta, ranks)
        except WeightSyncError as error:
            return wrong(f"{where}: {error}")
    held = {meta.name: full[meta.name][as_slices(region)] for meta, region in parts_of(metadata, rank)}
    if list(local) != list(held):
        return wrong(f"{where}: iter_local gives {list(local)}, its metadata say {list(held)}")
    return same_bits(local, held, f"{where}: iter_local against the regions of its metadata")


def export(rank: Rank, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Weights after training and logprobs of this rank's rows; on rank 0 what an export holds."""
    found = {}
    for model in models:
        with rank.engine(model, **TRAINING) as engine:
            shard = rank.shard(engine, batch())
            for _ in range(2):
                step(engine, shard)
            engine.export_hf(rank.path(model))
            scored = engine.forward(shard.drop(["loss_mask"]), Outputs())
            weights = weights_of(engine)
            found[model] = (weights, None if scored is None else scored.ragged("logprobs").values.cpu())
            if rank.context.rank == 0:
                # Read here: the case's directory need not be seen from where the suite runs for longer than an act.
                found[f"{model} exported"] = (stored_tensors(rank.path(model)), _rescored(rank.path(model)))
    return found


def _rescored(directory: str) -> torch.Tensor:
    """What the oracle makes of an export."""
    return Oracle(directory).scores(batch(), masked=False)["logprobs"]


def judge_export(seen: list[Seen], models: Sequence[str] = MODELS) -> Measured:
    """The export against the weights, and what transformers makes of it against the engine."""
    measured = []
    for model in models:
        exported, rescored = seen[0].value[f"{model} exported"]
        for one in seen:
            bits = same_bits(exported, one.value[model][0], f"{model} model, export against weights")
            if bits.error:
                return Measured(float("inf"), bits.detail)
        scored = torch.cat([value[model][1] for value in outputs_of(seen)])
        measured.append(largest_difference({"logprobs": scored}, {"logprobs": rescored}))
    return larger(*measured)


CHECKS = (
    Check(
        name="weights",
        capability=PROTOCOL,
        claim="At start the weights are the checkpoint's, bit for bit; each rank's own parts are where metadata say",
        tolerance=EXACT,
        acts=(read,),
        judge=judge_weights,
    ),
    Check(
        name="export",
        capability=PROTOCOL,
        claim="After training the export equals the weights bit for bit, and transformers scores with it as the engine",
        tolerance=1e-5,
        acts=(export,),
        judge=judge_export,
    ),
)
