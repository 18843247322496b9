"""Scores a short text with transformers on a CPU, from a model's files: logprobs, or the score of a classifier.

An engine with the same weights must compute the same scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from enginehouse.errors import first_line
from enginehouse.quiet import quiet_transformers

if TYPE_CHECKING:
    from enginehouse.engines.model import ModelSpec

MOST_BYTES = 4 << 30
"""Maximum size in bytes, as float32, of a model that is loaded a second time."""
TEXT = "1 + 1 = 2"


class FileScores(NamedTuple):
    """The scores that transformers computes for a text.

    Attributes:
        ids: token ids of the text.
        scores: logprob of each token after the first, or the single score of a classifier; None if there is no score.
        why_not: reason why there is no score; empty if there is one.
    """

    ids: list[int]
    scores: torch.Tensor | None
    why_not: str = ""


def score_files(directory: str, spec: ModelSpec) -> FileScores:
    """Score a short text with transformers, unless the model is too large or cannot be loaded in this process.

    Args:
        directory: directory of a model, or of an adapter in the form of `peft`.
        spec: the trained model.
    """
    is_adapter = (Path(directory) / "adapter_config.json").is_file()
    needed = _count_float32_bytes(Path(spec.path) if is_adapter else Path(directory), spec.dtype)
    if needed > MOST_BYTES or needed > psutil.virtual_memory().available / 2:
        return FileScores([], None, f"loading it in transformers would take {needed / 2**30:.1f} GiB")
    try:
        ids = _tokenize(spec.path if is_adapter else directory, spec)
        return FileScores(ids, _compute_scores(directory, ids, spec))
    except Exception as error:  # peft or a class of transformers may be missing, which is no fault of the files
        why_not = f"transformers cannot load it here ({type(error).__name__}: {first_line(error)})"
        return FileScores([], None, why_not)


def _tokenize(directory: str, spec: ModelSpec) -> list[int]:
    """Return the token ids of the text `TEXT`, followed by the tokenizer's end-of-sequence token, if it has one."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=spec.trust_remote_code)
    ids: list[int] = tokenizer(TEXT)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _compute_scores(directory: str, ids: list[int], spec: ModelSpec) -> torch.Tensor:
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
    return logits[:-1].double().log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].float()


def _count_float32_bytes(directory: Path, dtype: str) -> int:
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return stored * (1 if dtype == "float32" else 2)
