"""Compares an exported model with the one that was trained: a row scored by transformers, from the files, on a CPU.

Transformers scores it in the process of the actor's first rank, which has imported it and written the files.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from enginehouse.controller import Balanced
from enginehouse.data import Batch, Ragged
from enginehouse.data.rendering import load_tokenizer
from enginehouse.data.templates import text_ends
from enginehouse.engines.model import end_ids
from enginehouse.engines.train import Outputs
from enginehouse.errors import ModelError, SaveError, first_line
from enginehouse.quiet import quiet_transformers
from enginehouse.weights.effect import TOLERANCES

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup
    from enginehouse.engines.model import ModelSpec

MOST_BYTES = 4 << 30
"""A model that takes more in float32 is not loaded a second time."""
SCORE_TOLERANCES = {"float32": 2e-3, "bfloat16": 0.05}
"""By dtype, how far two scores may be apart, in parts of the score or of 1: a head that begins at zero scores little at
first, and another token about as little."""
TEXT = "1 + 1 = 2"


class ExportDiffers(SaveError):
    """An exported model gives other figures than the one that was trained."""


class FileScores(NamedTuple):
    """What transformers makes of a row by a model's files.

    Attributes:
        ids: the row.
        scores: the logprob of each token after the first, or the one score of a classifier; None where there are none.
        why_not: why there are none.
    """

    ids: list[int]
    scores: torch.Tensor | None
    why_not: str = ""


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
            f"{_shown(ours)}; transformers: {_shown(theirs)}"
        )
    return ""


def name_ends(directory: Path, spec: ModelSpec) -> None:
    """Say in an export's generation config what ends a text, the end of a turn too: whoever serves it stops there.

    Args:
        directory: of the export.
        spec: what the model was loaded from.
    """
    ends = _ends_of(spec.path, spec.trust_remote_code) if spec.head == "causal_lm" else ()
    file = directory / "generation_config.json"
    settings, config = (
        json.loads(one.read_text(encoding="utf-8")) if one.is_file() else {}
        for one in (file, directory / "config.json")
    )
    text = config.get("text_config") or config
    named = end_ids(settings.get("eos_token_id"), text.get("eos_token_id"))
    if set(ends) <= set(named):
        return
    settings["eos_token_id"] = [*named, *(end for end in ends if end not in named)]
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@functools.cache
def _ends_of(path: str, trust_remote_code: bool) -> tuple[int, ...]:
    """What ends a text of a model's tokenizer; nothing where it has none."""
    try:
        return text_ends(load_tokenizer(path, trust_remote_code))
    except ModelError:
        return ()


def score_files(directory: str, spec: ModelSpec) -> FileScores:
    """Score a row by transformers, unless the model is large or cannot be loaded here; arguments as above."""
    is_adapter = (Path(directory) / "adapter_config.json").is_file()
    needed = _float32_bytes(Path(spec.path) if is_adapter else Path(directory), spec.dtype)
    if needed > MOST_BYTES or needed > psutil.virtual_memory().available / 2:
        return FileScores([], None, f"it would take {needed / 2**30:.1f} GiB once more")
    try:
        ids = _row(spec.path if is_adapter else directory, spec)
        return FileScores(ids, _scores(directory, ids, spec))
    except Exception as error:  # no peft here, or no such class of transformers: no fault of the files
        why_not = f"transformers does not load it here ({type(error).__name__}: {first_line(error)})"
        return FileScores([], None, why_not)


def _row(directory: str, spec: ModelSpec) -> list[int]:
    """Token ids of a text with its end, as a tokenizer is documented to be used."""
    tokenizer = load_tokenizer(directory, spec.trust_remote_code)
    ids: list[int] = tokenizer(TEXT)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _scores(directory: str, ids: list[int], spec: ModelSpec) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForSequenceClassification if spec.head == "value" else AutoModelForCausalLM
    with quiet_transformers(), torch.no_grad(), torch.device("cpu"):
        model = kind.from_pretrained(
            directory, dtype=torch.float32, trust_remote_code=spec.trust_remote_code, local_files_only=True
        ).eval()
        row = torch.tensor([ids])
        logits: torch.Tensor = model(input_ids=row).logits[0]
    if spec.head == "value":
        return logits
    return logits[:-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]


def _float32_bytes(directory: Path, dtype: str) -> int:
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return stored * (1 if dtype == "float32" else 2)


def _shown(scores: torch.Tensor) -> str:
    return ", ".join(f"{score:.3f}" for score in scores[:8].tolist())
