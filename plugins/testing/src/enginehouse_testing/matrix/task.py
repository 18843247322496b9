"""The task of every matrix run: a tiny model with random weights, or the user's model, gets rewards for digits.

Rewards differ between samples from the first step on, so each step changes the weights and each update brings new
weights.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

from enginehouse_testing.model_under_test import TINY, ModelUnderTest

PROMPTS = 64
PROMPTS_A_STEP, SAMPLES_A_PROMPT, RESPONSE_TOKENS = 8, 8, 32
MOST_TOKENS = 128
"""Maximum length in tokens of a rollout's sequence. A layout's cache may have no room for the longest sequence of the
user's model."""
LEARNING_RATE, REAL_LEARNING_RATE = 1e-3, 2e-5
"""Learning rates of the tiny models, and of a user's model."""
CALL_SECONDS = 900.0
"""Longest time that starting the workers, or a call of a worker, may take on a busy machine."""
CONFIG = "matrix.yaml"
MODEL: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "key_value_heads": 2}
"""Qwen3's shape, with heads of 32 dimensions, the smallest that engines with their own attention kernels support."""


def digits(prompt: str, response: str, **columns: object) -> float:
    """Return the number of digits in a response, divided by the maximum length of a response in tokens.

    >>> digits("3 ", "1234 5678 abcdef")
    0.25
    """
    return sum(character.isdigit() for character in response) / RESPONSE_TOKENS


def learning_rate(model: str) -> float:
    """Return the learning rate for a model by its label."""
    return REAL_LEARNING_RATE if model and not model.startswith(TINY.title) else LEARNING_RATE


def make_task(directory: Path, under_test: ModelUnderTest = TINY) -> Path:
    """Write the model, its prompts and the config that all runs share, and return the config's path.

    A user's model is asked for sums. Nothing is downloaded, and the files are the same each time.
    """
    from enginehouse_testing.models import tiny_model

    directory.mkdir(parents=True, exist_ok=True)
    model, prompts, config = directory / "model", directory / "prompts.jsonl", directory / CONFIG
    if not under_test.path:
        shutil.copytree(tiny_model("qwen3", tied=False, **MODEL), model, dirs_exist_ok=True)
    draw = random.Random(0)
    make = _sum if under_test.path else _characters
    prompts.write_text("".join(json.dumps({"prompt": make(draw)}) + "\n" for _ in range(PROMPTS)))
    path = under_test.path or str(model)
    config.write_text(yaml.safe_dump(_config(path, under_test.dtype, prompts), sort_keys=False))
    return config


def _characters(draw: random.Random) -> str:
    return "".join(draw.choices("0123456789abcdef", k=draw.randint(2, 12))) + "="


def _sum(draw: random.Random) -> str:
    return f"{draw.randint(1, 30)} + {draw.randint(1, 30)} ="


def _config(path: str, dtype: str, prompts: Path) -> dict[str, Any]:
    return {
        "model": {"path": path, "dtype": dtype},
        "data": {"train": str(prompts), "max_prompt_tokens": 16},
        "reward": {"function": f"{__name__}:{digits.__name__}"},
        "rollout": {"samples_per_prompt": SAMPLES_A_PROMPT, "sampling": {"max_tokens": RESPONSE_TOKENS}},
        "train": {"prompts_per_step": PROMPTS_A_STEP, "samples_every": 0},
        "cluster": {"call_timeout_seconds": CALL_SECONDS},
        "run": {"overwrite": True},
    }
