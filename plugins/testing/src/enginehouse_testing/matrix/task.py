"""The task of every run of the matrix: a tiny model with random weights is rewarded for digits.

Rewards differ between samples from the first step on, so each step changes the weights and each update brings new ones.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

PROMPTS = 64
PROMPTS_A_STEP, SAMPLES_A_PROMPT, RESPONSE_TOKENS = 8, 8, 32
LEARNING_RATE = 1e-3
CALL_SECONDS = 900.0
"""Longest time the start of the workers, or a call of a worker, may take on a busy machine."""
CONFIG = "matrix.yaml"
MODEL: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "key_value_heads": 2}
"""Qwen3's shape, with heads of 32, the smallest that engines with their own attention kernels take."""


def digits(prompt: str, response: str, **columns: object) -> float:
    """Return the number of digits, as a part of the longest response.

    >>> digits("3 ", "1234 5678 abcdef")
    0.25
    """
    return sum(character.isdigit() for character in response) / RESPONSE_TOKENS


def make_task(directory: Path) -> Path:
    """Write the model, its prompts and the config that all runs share, and return the config's path.

    Nothing is downloaded, and the files are the same each time.
    """
    from enginehouse_testing.models import tiny_model

    directory.mkdir(parents=True, exist_ok=True)
    model, prompts, config = directory / "model", directory / "prompts.jsonl", directory / CONFIG
    shutil.copytree(tiny_model("qwen3", tied=False, **MODEL), model, dirs_exist_ok=True)
    draw = random.Random(0)
    rows = ({"prompt": "".join(draw.choices("0123456789abcdef", k=draw.randint(2, 12))) + "="} for _ in range(PROMPTS))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(yaml.safe_dump(_config(model, prompts), sort_keys=False))
    return config


def _config(model: Path, prompts: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"train": str(prompts), "max_prompt_tokens": 16},
        "reward": {"function": f"{__name__}:{digits.__name__}"},
        "rollout": {"samples_per_prompt": SAMPLES_A_PROMPT, "sampling": {"max_tokens": RESPONSE_TOKENS}},
        "train": {"prompts_per_step": PROMPTS_A_STEP, "samples_every": 0},
        "cluster": {"call_timeout_seconds": CALL_SECONDS},
        "run": {"overwrite": True},
    }
