"""The settings with which a run reads the items of a benchmark, as its plan did, and generates responses to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """A benchmark that a run evaluates.

    Attributes:
        folder: the directory with the files of its data set.
        is_chat: true if its prompts are chat messages, which the model's chat template renders.
        items: the number of items to answer.
        max_tokens: the maximum number of tokens of a response.
        stop: strings at which the engine ends a response.
        description: description of its lm-eval task.
    """

    name: str
    folder: Path
    is_chat: bool
    items: int
    max_tokens: int
    stop: tuple[str, ...]
    description: str
