"""Compares an exported model with the one that was trained: a row scored by transformers, from the files, on a CPU.

Transformers scores it in the process of the actor's first rank, which has imported it and written the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginehouse.controller import Balanced
from enginehouse.data import Batch, Ragged
from enginehouse.engines.train import Outputs
from enginehouse.errors import SaveError
from enginehouse.roles.file_scores import TEXT
from enginehouse.weights.effect import TOLERANCES

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup
    from enginehouse.engines.model import ModelSpec

SCORE_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.05}
"""By dtype, how far two scores may be apart, in parts of the score or of 1: a head that begins at zero scores little at
first, and another token about as little."""


class ExportDiffers(SaveError):
    """An exported model gives other figures than the one that was trained."""


def compare_export(directory: Path, actor: WorkerGroup, spec: ModelSpec) -> str:
    """Score a row by transformers from exported files and by the engine, and compare.

    Args:
        directory: a model, or an adapter as `peft` reads it.
        actor: the engine's workers; their weights are on their devices, and those that were exported.
        spec: what the actor was loaded from.

    Returns:
        Why the two were not compared; empty where they agree.

    Raises:
        ExportDiffers: they do not.
    """
    ids, theirs, why_not = actor.score_files(str(directory), spec)
    if theirs is None:
        return why_not
    rows = Balanced(Batch({"input_ids": Ragged.from_list([ids], dtype=torch.int64)}), by="input_ids")
    if spec.head == "value":
        ours, what = actor.score_rows(rows)["score"], "the score"
        most = SCORE_TOLERANCES[spec.dtype] * max(1.0, ours.abs().max().item())
    else:
        ours, what = actor.forward(rows, Outputs())["logprobs"].values[1:], "the logprobs of the tokens"
        most = TOLERANCES[spec.dtype]
    apart = (ours.double().cpu() - theirs.double()).abs().mean().item()
    if not apart <= most:  # NaN too
        raise ExportDiffers(
            f"what was exported is not what was trained: {what} of {TEXT!r} by transformers, from the files, and by "
            f"the engine are {apart:.3g} apart on average, and in {spec.dtype} {most:.3g} is rounding. The engine: "
            f"{_format_scores(ours)}; transformers: {_format_scores(theirs)}"
        )
    return ""


def _format_scores(scores: torch.Tensor) -> str:
    return ", ".join(f"{score:.3f}" for score in scores[:8].tolist())
