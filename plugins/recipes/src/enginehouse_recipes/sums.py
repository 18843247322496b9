"""Data of the recipes of `real/`: sums of two small numbers, and products of larger numbers for a calculator.

Sums are prompts, demonstrations and pairs of responses. The prompt of a product shows one tool call, because the
model's chat template does not describe tools.
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
"""A call in the shortest format of the environment `tools`, `qwen3_coder`."""

Row = dict[str, Any]


def make_sums(directory: Path, seed: int = 0) -> None:
    """Write 836 sums as prompts, demonstrations and pairs, 836 products, and 64 of each as `validation*.jsonl`."""
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
    """Return the answer as chosen, and a number with another tens digit as rejected.

    A model that has learned from demonstrations makes this mistake. Above 10 the wrong number is larger as often as
    smaller, so that its size gives no hint.
    """
    wrong = int(answer) + rng.choice((-10, 10))
    return {**prompt, "chosen": answer, "rejected": str(wrong if wrong > 0 else int(answer) + 10)}


def _make_product(first: int, second: int) -> Row:
    """Return a chat in which the tool has computed a smaller product. Its last message asks for `first * second`."""
    shown = 17, 23
    chat = (QUESTION.format(*shown), CALL.format(*shown), str(17 * 23), str(17 * 23), QUESTION.format(first, second))
    roles = ("user", "assistant", "tool", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, chat, strict=True)]
    return {"prompt": messages, "answer": str(first * second)}
