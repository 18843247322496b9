"""Data of the recipes of `real/`: sums of two small numbers, and products of larger ones for a calculator.

Sums are prompts, demonstrations and pairs of answers. A product's prompt shows the call of the tool once, since the
model's chat template tells of no tools.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

from enginehouse_recipes.sorting import write_lines

HELD_OUT = 64

PRODUCTS = 836

QUESTION = "{} boxes of {} pens: how many pens?"

CALL = "<function=calculator><parameter=expression>{} * {}</parameter></function>"
"""A call in the form `qwen3_coder` of the environment `tools`, the shortest."""

Row = dict[str, Any]


def make_sums(directory: Path, seed: int = 0) -> None:
    """Write prompts, demonstrations and pairs of 836 sums, as many products, and 64 others as `validation*.jsonl`."""
    directory.mkdir(parents=True)
    sums = list(itertools.product(range(1, 31), repeat=2))
    rng = random.Random(seed)
    rng.shuffle(sums)
    rows = [(_make_prompt(first, second), str(first + second)) for first, second in sums]
    prompts = [{**prompt, "answer": answer} for prompt, answer in rows]
    demonstrations = [{**prompt, "response": answer} for prompt, answer in rows]
    products = list(itertools.product(range(24, 100), repeat=2))
    rng.shuffle(products)
    pairs = [_make_pair(prompt, answer, rng) for prompt, answer in rows]
    calls = [_make_product(*factors) for factors in products[: HELD_OUT + PRODUCTS]]
    files = {"": prompts, "demonstrations": demonstrations, "pairs": pairs, "products": calls}
    for name, lines in files.items():
        write_lines(directory / f"{'_'.join(filter(None, ('validation', name)))}.jsonl", lines[:HELD_OUT])
        write_lines(directory / f"{name or 'train'}.jsonl", lines[HELD_OUT:])


def _make_prompt(first: int, second: int) -> Row:
    return {"prompt": [{"role": "user", "content": f"{first} + {second} = ?"}]}


def _make_pair(prompt: Row, answer: str, rng: random.Random) -> Row:
    """Return the answer before a number with another tens digit, the mistake of a model that demonstrations taught.

    Above 10 it is as often larger as smaller, so that its size tells nothing.
    """
    wrong = int(answer) + rng.choice((-10, 10))
    return {**prompt, "chosen": answer, "rejected": str(wrong if wrong > 0 else int(answer) + 10)}


def _make_product(first: int, second: int) -> Row:
    """Return a chat in which a smaller product was answered by the tool, and then this one is asked for."""
    shown = 17, 23
    chat = (QUESTION.format(*shown), CALL.format(*shown), str(17 * 23), str(17 * 23), QUESTION.format(first, second))
    roles = ("user", "assistant", "tool", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, chat, strict=True)]
    return {"prompt": messages, "answer": str(first * second)}
