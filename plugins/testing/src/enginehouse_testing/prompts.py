"""Models for every rollout engine, weights to update them to, and prompts.

Heads have 32 dimensions, the fewest that engines with their own attention kernels take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginehouse_testing.models import SPECIAL_TOKENS, VOCABULARY_SIZE, stepped_model, tiny_experts, tiny_model

MAX_MODEL_TOKENS = 2048
"""Longest sequence of every model, so long that a request can be interrupted before it ends."""

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
"""Functions that return the directory of a tiny model, by name. `"..., new"` has other weights of the same model, and
`"..., a step"` its weights after a step at a learning rate of 1e-6."""


def rollout_model(name: str) -> str:
    """Return the directory of one of `ROLLOUT_MODELS`."""
    return ROLLOUT_MODELS[name]()


def prompts(count: int, seed: int = 0, longest: int = 12, special: bool = False) -> list[list[int]]:
    """Return random prompts of 1 to `longest` tokens, which may be special tokens if `special` is true."""
    draw = np.random.default_rng(seed)
    lowest = 0 if special else len(SPECIAL_TOKENS)
    return [draw.integers(lowest, VOCABULARY_SIZE, draw.integers(1, longest + 1)).tolist() for _ in range(count)]
