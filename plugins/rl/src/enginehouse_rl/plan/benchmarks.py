"""A benchmark of a plan: what a run needs to read its items again, and to have them answered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class BenchmarkPlan:
    """A benchmark.

    Attributes:
        name: its name.
        folder: the files of its data set.
        is_chat: true if its prompts are chat messages, for the model's chat template.
        items: the number of its items.
        max_tokens: the most tokens of a response.
        stop: strings at which the engine ends a response.
        description: description of its task of lm-eval.
    """

    name: str
    folder: Path
    is_chat: bool
    items: int
    max_tokens: int
    stop: tuple[str, ...]
    description: str
