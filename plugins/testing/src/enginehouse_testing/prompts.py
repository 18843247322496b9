"""What every rollout engine is given: models, weights to update them to, and prompts.

Heads are of 32, the smallest that engines with attention kernels of their own take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginehouse_testing.models import SPECIAL_TOKENS, VOCABULARY_SIZE, stepped_model, tiny_experts, tiny_model

MAX_MODEL_TOKENS = 2048
"""Longest sequence of every model: enough that a request is still under way when it is to be interrupted."""

SHAPE: dict[str, Any] = {"hidden": 128, "heads": 4, "key_value_heads": 2, "max_positions": MAX_MODEL_TOKENS}

ROLLOUT_MODELS: Mapping[str, Callable[[], str]] = {
    "tied": lambda: tiny_model("qwen3", True, **SHAPE),
    "tied, new": lambda: tiny_model("qwen3", True, seed=1, **SHAPE),
    "tied, a step": lambda: stepped_model(rollout_model("tied"), 1),
    "tied, two steps": lambda: stepped_model(rollout_model("tied"), 2),
    "untied": lambda: tiny_model("llama", False, **SHAPE),
    "untied, new": lambda: tiny_model("llama", False, seed=1, **SHAPE),
    "experts": lambda: tiny_experts(max_positions=MAX_MODEL_TOKENS),
    "experts, new": lambda: tiny_experts(seed=1, max_positions=MAX_MODEL_TOKENS),
}
"""Tiny models by name, each a function that gives its directory; `"..., new"` are other weights of the same model, and
`"..., a step"` those after a step at a learning rate of 1e-6."""


def rollout_model(name: str) -> str:
    """Directory of one of `ROLLOUT_MODELS`."""
    return ROLLOUT_MODELS[name]()


def prompts(count: int, seed: int = 0, longest: int = 12, special: bool = False) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens; with `special` any token may stand in them."""
    draw = np.random.default_rng(seed)
    lowest = 0 if special else len(SPECIAL_TOKENS)
    return [draw.integers(lowest, VOCABULARY_SIZE, draw.integers(1, longest + 1)).tolist() for _ in range(count)]
