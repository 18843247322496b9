"""Agents played as a run plays them, by a scripted policy; and what that drew compared with what is trained on."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from enginehouse.engines.environment import Episode, Task
from enginehouse.engines.rollout import Completion, GenerateRequest, SamplingParams
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.drawn_tokens import DrawnTokens
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner

MOST_TOKENS = 4000


class Scripted:
    """Draws what a script says.

    Args:
        tokenizer: of the model.
        script: an answer's text, or its tokens, given the text so far and the number of the completion. What it says
            is closed, unless it is longer than may be drawn.

    Attributes:
        drawn: each request with its completions.
    """

    def __init__(self, tokenizer: Any, script: Callable[[str, int], str | Sequence[int]]):
        self.tokenizer, self._script = tokenizer, script
        self.drawn: list[tuple[GenerateRequest, list[Completion]]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.waiting = 0
        self._counted = 0

    async def generate(self, request: GenerateRequest) -> Any:
        self.waiting += 1
        try:
            await self.hold.wait()
        finally:
            self.waiting -= 1
        text = self.tokenizer.decode(request.prompt_ids)
        completions = [self._one(request, self._script(text, number)) for number in range(request.sampling.n)]
        self.drawn.append((request, completions))
        return SimpleNamespace(completions=completions)

    def _one(self, request: GenerateRequest, said: str | Sequence[int]) -> Completion:
        most, finish = request.sampling.max_tokens, "stop"
        if isinstance(said, str):
            said = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        for place in range(1, len(said)):
            if any(stop in self.tokenizer.decode(said[:place]) for stop in request.sampling.stop):
                said = said[:place]
                break
        if len(said) > most:
            said, finish = said[:most], "length"
        begin, self._counted = self._counted, self._counted + len(said)
        logprobs = -1e-4 * np.arange(begin + 1, begin + 1 + len(said), dtype=np.float32)  # no two alike
        return Completion(np.array(said, np.int32), logprobs, finish, 3, 3 + len(self.drawn) % 2)


def play(
    environment: Any, fleet: Scripted, task: Task, *, samples: int = 1, score: Any = None, **player: Any
) -> Sequence[Episode]:
    """The episodes of a task, checked as in a run."""

    async def scorer(rows: Any) -> Any:
        return [score(**row) for row in rows]

    async def played() -> Sequence[Episode]:
        sampling = player.pop("sampling", SamplingParams(max_tokens=200))
        policy = FleetPolicy(fleet, fleet.tokenizer, sampling, "task", 11)
        checks = EpisodeChecks("agent", len(fleet.tokenizer), MOST_TOKENS, True, sampling.temperature)
        made = EpisodeRunner(environment, lambda task: policy, scorer, samples, **{"checks": checks, **player})
        return await made.play(task)

    return asyncio.run(played())


def assert_as_drawn(episodes: Sequence[Episode], fleet: Scripted, temperature: float = 1.0) -> None:
    """Each drawn token is chosen in one row, after just the tokens that it was drawn after, and no other is chosen."""
    drawn = DrawnTokens()
    drawn._tokenizer = fleet.tokenizer
    wanted: Counter[Any] = Counter()
    for request, completions in fleet.drawn:
        drawn.add(request.prompt_ids, completions, request.sampling)
        for one in completions:
            if len(one.token_ids) and request.sampling.temperature == temperature:
                wanted[tuple(request.prompt_ids), tuple(map(int, one.token_ids)), tuple(map(float, one.logprobs))] += 1
    found: Counter[Any] = Counter()
    for row in [row for episode in episodes for row in episode.rows]:
        tokens, mask = np.array(row.tokens), np.array(row.mask, bool)
        logprobs, versions = np.array(row.logprobs, np.float32), np.array(row.versions)
        assert drawn.find_problem(tokens, mask, logprobs, versions, temperature) == ""
        assert not logprobs[~mask].any()
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
        for begin, end in edges:
            found[tuple(tokens[:begin]), tuple(tokens[begin:end]), tuple(map(float, logprobs[begin:end]))] += 1
    assert found == wanted
