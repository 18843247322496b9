"""Compares an exported model with the trained model: transformers and the engine compute the logprobs of the same row.

For a model with a value head, they compute its score. transformers reads the exported files, and computes on a CPU in
the process of the actor's first rank, which has already imported transformers and written the files.
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
"""Largest permitted difference of two scores, by dtype. It is a fraction of the score, or of 1 if the score is below 1,
because the scores of a head that starts at zero are near 0 at first."""


class ExportDiffers(SaveError):
    """An exported model computes other values than the trained model."""


def compare_export(directory: Path, actor: WorkerGroup, spec: ModelSpec) -> str:
    """Compute a row's logprobs, or its score, by transformers from the exported files and by the engine. Compare both.

    Args:
        directory: A model, or an adapter in the format of `peft`.
        actor: Workers of the engine. The exported weights must be on their devices.
        spec: Model from which the actor was loaded.

    Returns:
        The reason why the results could not be compared; empty if they agree.

    Raises:
        ExportDiffers: The results differ by more than rounding explains.
    """
    ids, file_scores, problem = actor.score_files(str(directory), spec)
    if file_scores is None:
        return problem
    rows = Balanced(Batch({"input_ids": Ragged.from_list([ids], dtype=torch.int64)}), by="input_ids")
    if spec.head == "value":
        engine_scores, kind = actor.score_rows(rows)["score"], "the score"
        tolerance = SCORE_TOLERANCES[spec.dtype] * max(1.0, engine_scores.abs().max().item())
    else:
        engine_scores, kind = actor.forward(rows, Outputs())["logprobs"].values[1:], "the logprobs of the tokens"
        tolerance = TOLERANCES[spec.dtype]
    difference = (engine_scores.double().cpu() - file_scores.double()).abs().mean().item()
    if not difference <= tolerance:  # also true for NaN
        raise ExportDiffers(
            f"the exported model differs from the trained model: {kind} of {TEXT!r}, computed by transformers from the "
            f"exported files and by the engine, differ by {difference:.3g} on average, but rounding in {spec.dtype} "
            f"explains at most {tolerance:.3g}. Engine: {_format_scores(engine_scores)}; transformers: "
            f"{_format_scores(file_scores)}"
        )
    return ""


def _format_scores(scores: torch.Tensor) -> str:
    return ", ".join(f"{score:.3f}" for score in scores[:8].tolist())
