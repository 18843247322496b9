"""The environment `acme_algorithm`: after an answer with reward 0 the model gets a further try."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task
from enginehouse.engines.transcript import Transcript


class AcmeAlgorithmEnvironment:
    """Implements `enginehouse.engines.environment.Environment`.

    Args:
        tries: maximum number of answers to a prompt. The last answer is the episode.
    """

    def __init__(self, tries: int = 2) -> None:
        self._tries = tries

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """Request answers to a prompt until the configured reward is above 0 or no tries are left."""

        async def play(number: int, policy: Policy) -> Episode:
            for attempt in range(self._tries):
                said = Transcript(task.prompt_ids)
                drawn = said.add_drawn(await policy.branch(f"try {attempt}").generate(said.tokens))
                response = policy.tokenizer.decode(drawn, skip_special_tokens=True)
                (score,) = await context.score([{**task.columns, "prompt": task.prompt, "response": response}])
                if score.reward > 0:
                    break
            return said.episode(score, task.prompt, response)

        return await context.each(play)
