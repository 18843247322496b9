from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from enginehouse.data.templates import find_begun_turn
from enginehouse.engines.environment import Episode
from enginehouse.engines.transcript import response_text, versions_of

if TYPE_CHECKING:
    from enginehouse.engines.environment import EpisodeContext, Policy, Score, Task
    from enginehouse.engines.rollout import Completion


class SingleTurn:
    """Generates one response to each prompt, which the configured reward scores. The default environment."""

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        prompt = np.asarray(task.prompt_ids, dtype=np.int64)
        completions = await policy.samples(task.prompt_ids, context.samples)
        begun = find_begun_turn(policy.tokenizer, task.prompt, task.messages) if task.messages else ""
        responses = [
            begun + response_text(policy.tokenizer, completion.token_ids, completion.finish_reason)
            for completion in completions
        ]
        shared = {**task.columns, "prompt": task.prompt, "messages": task.messages}
        scores = await context.score(
            [
                {
                    **shared,
                    "response": response,
                    "response_tokens": len(completion.token_ids),
                    "finish_reason": completion.finish_reason,
                }
                for completion, response in zip(completions, responses, strict=True)
            ]
        )
        return [
            make_episode(task.prompt, prompt, completion, response, score)
            for completion, response, score in zip(completions, responses, scores, strict=True)
        ]


def make_episode(text: str, prompt: np.ndarray, completion: Completion, response: str, score: Score) -> Episode:
    start = len(prompt)
    length = start + len(completion.token_ids)
    tokens, mask, logprobs = np.empty(length, np.int64), np.zeros(length, np.bool_), np.zeros(length, np.float32)
    versions = np.zeros(length, np.int64)
    tokens[:start], tokens[start:] = prompt, completion.token_ids
    mask[start:] = True
    logprobs[start:] = completion.logprobs
    versions[start:] = versions_of(completion)
    return Episode(tokens, mask, logprobs, versions, score, text, response, completion.finish_reason)
