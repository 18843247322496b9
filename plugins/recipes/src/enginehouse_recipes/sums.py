"""Data of the recipe `real/grpo`: sums of two numbers from 1 to 30."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from enginehouse_recipes.sorting import write_lines

HELD_OUT = 64


def make_sums(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` with 836 sums, and `validation.jsonl` with others."""
    directory.mkdir(parents=True)
    pairs = list(itertools.product(range(1, 31), repeat=2))
    random.Random(seed).shuffle(pairs)
    rows = [
        {"prompt": [{"role": "user", "content": f"{first} + {second} = ?"}], "answer": str(first + second)}
        for first, second in pairs
    ]
    write_lines(directory / "validation.jsonl", rows[:HELD_OUT])
    write_lines(directory / "train.jsonl", rows[HELD_OUT:])
