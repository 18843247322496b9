"""One answer to each prompt, scored by the configured reward: what is trained on unless the config says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from enginehouse.engines.environment import Episode

if TYPE_CHECKING:
    from enginehouse.engines.environment import EpisodeContext, Policy, Task
    from enginehouse.engines.rollout import Completion


class SingleTurn:
    """Implements `enginehouse.engines.environment.Environment`."""

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """See the protocol."""
        prompt = np.asarray(task.prompt_ids, dtype=np.int64)
        completions = await policy.samples(task.prompt_ids, context.samples)
        responses = policy.tokenizer.batch_decode(
            [np.asarray(one.token_ids, dtype=np.int64) for one in completions],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        given = {**task.columns, "prompt": task.prompt, "messages": task.messages}
        scores = await context.score(
            [
                {**given, "response": response, "finish_reason": one.finish_reason}
                for one, response in zip(completions, responses, strict=True)
            ]
        )
        return [
            Episode(
                tokens=np.concatenate([prompt, np.asarray(one.token_ids, dtype=np.int64)]),
                mask=np.arange(len(prompt) + len(one.token_ids)) >= len(prompt),
                logprobs=np.concatenate([np.zeros(len(prompt), np.float32), np.asarray(one.logprobs, np.float32)]),
                versions=versions_of(one, len(prompt)),
                score=score,
                prompt=task.prompt,
                response=response,
                finish=one.finish_reason,
            )
            for one, response, score in zip(completions, responses, scores, strict=True)
        ]


def versions_of(completion: Completion, before: int) -> np.ndarray:
    """Weight version of each token, after `before` given ones; of all but the last the oldest it may be."""
    versions = np.full(before + len(completion.token_ids), completion.first_version, dtype=np.int64)
    versions[len(versions) - 1 :] = completion.last_version
    return versions
