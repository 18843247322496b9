"""What both sides of the benchmark `episodes` play with: prompts, and a tool whose answers take their time.

All of it depends on the number of the episode, or of its task, and of the turn alone. The sides run in Python
environments of their own, so this imports nothing.
"""

from __future__ import annotations

import random
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 10, 8000
"""Of the model's vocabulary: what prompts and answers of the tool are made of."""


class Tool:
    """A tool that sleeps.

    Args:
        task: see `episodes.measure`.
    """

    def __init__(self, task: dict[str, Any]):
        self._longest, self._tokens = float(task["sleep"]), int(task["result_tokens"])

    def seconds(self, episode: int, turn: int) -> float:
        """How long it takes to answer after a turn: from 0 to the longest, evenly."""
        return random.Random(f"sleep {episode} {turn}").uniform(0.0, self._longest)

    def answer(self, episode: int, turn: int) -> list[int]:
        """What it answers, as token ids."""
        return _tokens(f"answer {episode} {turn}", self._tokens)


def prompt(number: int, tokens: int) -> list[int]:
    """The prompt of a task."""
    return _tokens(f"prompt {number}", tokens)


def longest_sleep(task: dict[str, Any]) -> float:
    """Seconds that the episode whose tool takes longest, in all, waits for it."""
    tool, turns = Tool(task), range(task["turns"] - 1)
    return max(sum(tool.seconds(episode, turn) for turn in turns) for episode in range(task["episodes"]))


def _tokens(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
