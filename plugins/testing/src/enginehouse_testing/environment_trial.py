"""Plays an environment under test with a scripted policy instead of a model, on one event loop."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginehouse.engines.environment import Environment, Episode, Policy, Score, Scored, Task
from enginehouse.engines.rollout import Completion, SamplingParams
from enginehouse.plugin import resolve
from enginehouse_rl.episodes.drawn_tokens import DrawnTokens
from enginehouse_rl.episodes.policies import SamplingPolicy
from enginehouse_testing.models import char_tokenizer
from enginehouse_testing.trial import Trial

SAMPLES = 3
REPLIES = ("4", "the answer is 4", "5", "no", "7 7 7")
VERSION = 3


class ScriptedPolicy(SamplingPolicy):
    """Answers with replies from a list. Implements `enginehouse.engines.environment.Policy`.

    The branch and the number of the call determine the reply and its logprobs.

    Args:
        replies: texts to answer with.
        delay: function that takes a call's name, and returns how many turns of the event loop the call takes.
        error: error that every call raises, or None.
        name: the branch's name.
    """

    def __init__(
        self,
        replies: Sequence[str],
        delay: Callable[[str], float],
        error: Exception | None,
        name: str = "policy",
    ):
        self.tokenizer, self.sampling = char_tokenizer(), SamplingParams()
        self._replies, self._delay, self._error, self._name = replies, delay, error, name
        self._calls = 0

    async def samples(
        self, tokens: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> Sequence[Completion]:
        """Return `n` replies, whatever the tokens."""
        name, self._calls = f"{self._name}/{self._calls}", self._calls + 1
        turns = self._delay(name)
        while turns > 0:
            await asyncio.sleep(0)
            turns -= 1
        if self._error is not None:
            raise self._error
        return [self._completion(f"{name}#{number}") for number in range(n)]

    def branch(self, name: str) -> ScriptedPolicy:
        """Return a policy whose replies do not depend on calls of this policy."""
        return ScriptedPolicy(self._replies, self._delay, self._error, f"{self._name}/{name}")

    def _completion(self, name: str) -> Completion:
        chance = number_of(name)
        ids = self.tokenizer(self._replies[chance % len(self._replies)], add_special_tokens=False)["input_ids"]
        logprobs = [-((chance + place) % 97 + 1) / 64 for place in range(len(ids))]
        return Completion(list(ids), logprobs, "stop", VERSION, VERSION)


def number_of(name: str) -> int:
    """Return a number that depends only on a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


class TrialContext:
    """Scores rows by their length. Implements `enginehouse.engines.environment.EpisodeContext`."""

    def __init__(self, policy: Policy):
        self.samples = SAMPLES
        self.most_tokens: int | None = None
        self._policy = policy

    async def score(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Score]:
        """Return the lengths of the responses."""
        await asyncio.sleep(0)
        return [Scored(float(len(str(row.get("response", ""))))) for row in rows]

    async def each(self, play: Callable[[int, Policy], Awaitable[Episode]]) -> Sequence[Episode]:
        """Play each episode. Unlike in a run, an error in one episode ends all episodes."""
        return await asyncio.gather(
            *(play(number, self._policy.branch(f"episode-{number}")) for number in range(self.samples))
        )


@dataclass(frozen=True, slots=True)
class EnvironmentTrial(Trial):
    """Makes and plays an environment."""

    def tasks(self) -> list[Task]:
        """Return the author's rows of data as tasks, or made-up tasks."""
        rows = self.given.examples or [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 4 =", "answer": "7"}]
        tokenizer = char_tokenizer()
        return [
            Task(
                serial=number,
                prompt_ids=tokenizer(str(row.get("prompt", "")), add_special_tokens=False)["input_ids"],
                prompt=str(row.get("prompt", "")),
                messages=row.get("messages"),
                columns={name: value for name, value in row.items() if name not in ("prompt", "messages")},
            )
            for number, row in enumerate(rows)
        ]

    def environment(self) -> Environment:
        """Return a new environment."""
        environment: Environment = resolve(self.record.environment)(**self.given.arguments)
        return environment

    async def play(
        self,
        environment: Environment,
        task: Task,
        drawn: DrawnTokens | None = None,
        delay: Callable[[str], float] = lambda name: 1,
        error: Exception | None = None,
    ) -> Sequence[Episode]:
        """Return the episodes of a task. `drawn` records the tokens that the policy generates."""
        policy: Policy = ScriptedPolicy(self.given.replies or REPLIES, delay, error)
        if drawn is not None:
            policy = drawn.record(policy)
        return await environment.run(task, policy, TrialContext(policy))
