"""Environments of several turns, and broken ones; the first are those of docs/plugins/environment.md."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Scored, Task
from enginehouse.engines.transcript import Transcript

PAGE = (Path(__file__).parents[1] / "docs" / "plugins" / "environment.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    """A block of the page in a language: the first, or a later one."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[number]


def page_environment(name: str = "Guessing", number: int = 0) -> Any:
    """A class on the page, in this one of its blocks."""
    found: dict[str, Any] = {}
    exec(block("python", number), found)
    return found[name]


class Counting:
    """The first turns of a group are one request. A tool says how long each is, and the configured reward scores.

    Args:
        step: reward of the first answer, for each of its tokens.
    """

    def __init__(self, step: float = 0.0):
        self.step = step

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        played = []
        for first in await policy.samples(task.prompt_ids, context.samples):
            said = Transcript(task.prompt_ids)
            length = len(said.add_drawn(first))
            if self.step:
                said.add_reward(self.step * length)
            said.add_given(policy.tokenizer.encode(str(length), add_special_tokens=False))
            said.add_drawn(await policy.generate(said.tokens))
            played.append(said)
        texts = [policy.tokenizer.decode(said.tokens) for said in played]
        scores = await context.score(
            [{"prompt": task.prompt, "response": text, "finish_reason": "stop"} for text in texts]
        )
        return [said.episode(score, task.prompt, text) for said, score, text in zip(played, scores, texts, strict=True)]


class Encoding:
    """Says again what was said, from its text."""

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        return await context.each(lambda number, policy: self.play(task, policy))

    async def play(self, task: Task, policy: Policy) -> Episode:
        completion = await policy.generate(task.prompt_ids)
        text = policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        again = policy.tokenizer.encode(text, add_special_tokens=False)
        said = Transcript(task.prompt_ids)
        said.add_drawn(replace(completion, token_ids=again, logprobs=[*completion.logprobs, *[0.0] * 9][: len(again)]))
        return said.episode(Scored(0.0), task.prompt, text)
