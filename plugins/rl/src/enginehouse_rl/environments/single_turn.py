"""One answer to each prompt, scored by the configured reward: what is trained on unless the config says otherwise."""

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
    """One answer to each prompt; implements `enginehouse.engines.environment.Environment`."""

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """See the protocol."""
        prompt = np.asarray(task.prompt_ids, dtype=np.int64)
        completions = await policy.samples(task.prompt_ids, context.samples)
        begun = find_begun_turn(policy.tokenizer, task.prompt, task.messages) if task.messages else ""
        responses = [begun + response_text(policy.tokenizer, one.token_ids, one.finish_reason) for one in completions]
        given = {**task.columns, "prompt": task.prompt, "messages": task.messages}
        scores = await context.score(
            [
                {
                    **given,
                    "response": response,
                    "response_tokens": len(one.token_ids),
                    "finish_reason": one.finish_reason,
                }
                for one, response in zip(completions, responses, strict=True)
            ]
        )
        return [
            episode(task.prompt, prompt, one, response, score)
            for one, response, score in zip(completions, responses, scores, strict=True)
        ]


def episode(text: str, prompt: np.ndarray, completion: Completion, response: str, score: Score) -> Episode:
    """A prompt and its answer."""
    given = len(prompt)
    length = given + len(completion.token_ids)
    tokens, mask, logprobs = np.empty(length, np.int64), np.zeros(length, np.bool_), np.zeros(length, np.float32)
    versions = np.zeros(length, np.int64)
    tokens[:given], tokens[given:] = prompt, completion.token_ids
    mask[given:] = True
    logprobs[given:] = completion.logprobs
    versions[given:] = versions_of(completion)
    return Episode(tokens, mask, logprobs, versions, score, text, response, completion.finish_reason)
