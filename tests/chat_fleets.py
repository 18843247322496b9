"""A fleet that says what a test wants said, and plays of an environment by it, checked as those of a run are."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from enginehouse.engines.environment import Episode, Scored, Task
from enginehouse.engines.rollout import Completion, GenerateRequest, SamplingParams
from enginehouse_rl.episodes.checks import EpisodeChecks
from enginehouse_rl.episodes.policies import FleetPolicy
from enginehouse_rl.episodes.runner import EpisodeRunner


class ChatFleet:
    """Answers each request with the next of its texts, and its end; what it drew is kept.

    Args:
        tokenizer: encodes them.
        answers: texts, or what gives one for the text of all tokens before.
        end: token that closes an answer; None: the tokenizer's end of sequence.
    """

    def __init__(self, tokenizer: Any, answers: Sequence[str] | Callable[[str], str], end: int | None = None):
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id if end is None else end
        self._answers = answers if callable(answers) else None
        self._texts = None if callable(answers) else iter(answers)
        self.requests: list[GenerateRequest] = []
        self.completions: list[Completion] = []

    async def generate(self, request: GenerateRequest) -> Any:
        """As `RolloutFleet.generate`: another weight version at each request."""
        before = self.tokenizer.decode(request.prompt_ids)
        text = self._answers(before) if self._answers else next(self._texts)  # type: ignore[arg-type]
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end]
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        version, place = len(self.requests), len(request.prompt_ids)
        logprobs = [-(place + number) / 64 for number in range(len(ids))]
        completion = Completion(ids, logprobs, reason, version, version + 1)
        self.requests.append(request)
        self.completions.append(completion)
        return SimpleNamespace(completions=[completion])


def play(
    environment: Any,
    fleet: ChatFleet,
    task: Task | None = None,
    samples: int = 1,
    most_tokens: int | None = None,
    max_tokens: int = 1000,
    scorer: Any = None,
    on_failure: Any = "fail",
) -> Sequence[Episode]:
    """The episodes of a task, which passed the checks of a run.

    Args:
        environment: plays it.
        fleet: says what the policy does.
        task: unset, a question.
        samples: how many episodes.
        most_tokens: how many tokens the models read.
        max_tokens: longest answer.
        scorer: of rows; unset, each gets 1.
        on_failure: as in a config.
    """

    async def ones(rows: Sequence[Any]) -> list[Scored]:
        return [Scored(1.0, {"length": len(row["response"])}) for row in rows]

    task = task or Task(7, [1, 2], "What is 2 + 3?", None, {"answer": "5"})
    vocabulary = len(fleet.tokenizer)
    player = EpisodeRunner(
        environment,
        lambda task: FleetPolicy(fleet, fleet.tokenizer, SamplingParams(max_tokens=max_tokens), "task", 11),
        scorer or ones,
        samples,
        on_failure,
        checks=EpisodeChecks("tested", vocabulary, most_tokens, True, 1.0),
    )
    return asyncio.run(player.play(task))
