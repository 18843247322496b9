"""Prompts and the tool of both sides of the benchmark `episodes`. The tool's answers take time.

Everything depends only on the number of the episode, or of its task, and of the turn. The sides run in separate Python
environments, so this module imports nothing of enginehouse.
"""

from __future__ import annotations

import random
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 10, 8000
"""Range of the model's token ids from which prompts and the tool's answers are made."""


class Tool:
    """A tool that sleeps; for `task` see `episodes.measure`."""

    def __init__(self, task: dict[str, Any]):
        self._longest, self._tokens = float(task["sleep"]), int(task["result_tokens"])

    def seconds(self, episode: int, turn: int) -> float:
        """Return the time to answer after a turn, evenly distributed from 0 to the longest."""
        return random.Random(f"sleep {episode} {turn}").uniform(0.0, self._longest)

    def answer(self, episode: int, turn: int) -> list[int]:
        """Return the tool's answer as token ids."""
        return _tokens(f"answer {episode} {turn}", self._tokens)


def prompt(number: int, tokens: int) -> list[int]:
    """Return the prompt of a task."""
    return _tokens(f"prompt {number}", tokens)


def longest_sleep(task: dict[str, Any]) -> float:
    """Return the total seconds that the episode with the slowest tool waits for it."""
    tool, turns = Tool(task), range(task["turns"] - 1)
    return max(sum(tool.seconds(episode, turn) for turn in turns) for episode in range(task["episodes"]))


def _tokens(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]
