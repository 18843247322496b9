"""Models for every rollout engine, weights to update them to, and prompts.

Heads have 32 dimensions, the fewest that engines with their own attention kernels support.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from enginehouse_testing.models import (
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    adapted_model,
    stepped_model,
    tiny_experts,
    tiny_model,
)

MAX_MODEL_TOKENS = 2048
"""Maximum length in tokens of a sequence, for every model. It is large, so that a request can be interrupted before it
ends."""

SHAPE: dict[str, Any] = {"hidden": 128, "heads": 4, "key_value_heads": 2, "max_positions": MAX_MODEL_TOKENS}

ROLLOUT_MODELS: Mapping[str, Callable[[], str]] = {
    "tied": lambda: tiny_model("qwen3", True, **SHAPE),
    "tied, new": lambda: tiny_model("qwen3", True, seed=1, **SHAPE),
    "tied, a step": lambda: stepped_model(rollout_model("tied"), 1),
    "tied, two steps": lambda: stepped_model(rollout_model("tied"), 2),
    "adapted": lambda: adapted_model(rollout_model("tied"), None),
    "adapted, new": lambda: adapted_model(rollout_model("tied"), 0),
    "adapted, newer": lambda: adapted_model(rollout_model("tied"), 1),
    "untied": lambda: tiny_model("llama", False, **SHAPE),
    "untied, new": lambda: tiny_model("llama", False, seed=1, **SHAPE),
    "experts": lambda: tiny_experts(max_positions=MAX_MODEL_TOKENS),
    "experts, new": lambda: tiny_experts(seed=1, max_positions=MAX_MODEL_TOKENS),
}
"""Functions that return the directory of a tiny model, by name. `"..., new"` has other weights of the same model, and
`"..., a step"` its weights after a step at a learning rate of 1e-6. An engine that serves `"adapted"` gets updates that
bring adapters alone."""


TEXTS: Mapping[str, tuple[str, ...]] = {
    "The capital of France is": (
        " Paris, which lies on the river Seine in the north of the country.",
        " Paris.",
        " a city of two million people, and it is called Paris.",
        " not London, which is the capital of England.",
    ),
    "Question: what is 12 + 7? Answer:": (
        " 12 + 7 = 19, because 12 + 8 is 20 and one less is 19.",
        " 19",
        " The sum of 12 and 7 is 20.",
        " I do not know, but it is more than 12.",
    ),
    "Once upon a time there was": (
        " a little girl who lived in a small house at the edge of a large forest.",
        " a king.",
        " an old man with three sons, and the youngest of them was a fool.",
        " 3.14159265358979, and nothing else in the world.",
    ),
    "def add(a, b):": (
        "\n    return a + b",
        "\n    # adds two numbers\n    total = a + b\n    return total",
        " pass",
        "\n    raise NotImplementedError",
    ),
}
"""Prompts and responses for a user's model, to be encoded by its tokenizer."""


def rollout_model(name: str) -> str:
    """Return the directory of one of `ROLLOUT_MODELS`; any other name is a directory."""
    return ROLLOUT_MODELS[name]() if name in ROLLOUT_MODELS else name


@functools.cache
def texts_as_ids(path: str) -> list[tuple[list[int], list[list[int]]]]:
    """Tokenize `TEXTS` with a model's tokenizer, and return the first tokens of each prompt and of its responses."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def encode(text: str, most: int, **how: bool) -> list[int]:
        ids: list[int] = tokenizer(text, **how)["input_ids"]
        return ids[:most]

    return [
        (encode(prompt, 12), [encode(response, 20, add_special_tokens=False) for response in responses])
        for prompt, responses in TEXTS.items()
    ]


def prompts(count: int, seed: int = 0, longest: int = 12, special: bool = False) -> list[list[int]]:
    """Return random prompts of 1 to `longest` tokens. If `special` is true, they may contain special tokens."""
    draw = np.random.default_rng(seed)
    lowest = 0 if special else len(SPECIAL_TOKENS)
    return [draw.integers(lowest, VOCABULARY_SIZE, draw.integers(1, longest + 1)).tolist() for _ in range(count)]
