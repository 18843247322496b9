"""An example game: guess a number in two turns, with a hint between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from enginehouse.engines.environment import Scored
from enginehouse.errors import ConfigError, DataError, nearest
from enginehouse_environments.dialogue import ChatTemplate, Dialogue

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task


class GuessingGame:
    """Guess the number in the column `secret`. After a wrong guess the hint is "higher" or "lower".

    The last whole number of an answer is the guess. An answer without a number ends the game.

    Args:
        turns: maximum number of guesses.
        later: reward of a right guess that is not the first; a right first guess has the reward 1.
    """

    def __init__(self, turns: Annotated[int, Field(ge=1)] = 2, later: float = 1.0):
        self.turns, self.later = turns, later

    needs_reward = False

    @staticmethod
    def check(arguments: Mapping[str, Any], columns: Sequence[str] | None) -> None:
        """Raise `ConfigError` if rows have no secret."""
        if columns is not None and "secret" not in columns:
            near = nearest("secret", columns)
            raise ConfigError(f"the data has no column 'secret', the number to guess. {near}")

    @staticmethod
    def check_tokenizer(arguments: Mapping[str, Any], tokenizer: Any) -> None:
        """Raise `UserError` for a tokenizer without a chat template."""
        ChatTemplate(tokenizer)

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        template, most = ChatTemplate(policy.tokenizer), context.most_tokens or math.inf
        messages = task.messages or [{"role": "user", "content": task.prompt}]
        secret = task.columns.get("secret")
        if not isinstance(secret, int):
            raise DataError(f"guessing_game needs a whole number in the column 'secret' of each row, not {secret!r}")

        async def play(number: int, policy: Policy) -> Episode:
            dialogue = Dialogue(template, messages, task.prompt_ids)
            guesses: list[int] = []
            for turn in range(self.turns):
                hint = "higher" if turn and secret > guesses[-1] else "lower"
                if turn and not dialogue.say([{"role": "user", "content": hint}], most - 1):
                    break
                room = most - len(dialogue.transcript.tokens)
                await dialogue.answer(policy, int(min(room, policy.sampling.max_tokens)))
                numbers = re.findall(r"-?\d+", dialogue.last)
                if not numbers:
                    break
                guesses.append(int(numbers[-1]))
                if guesses[-1] == secret:
                    break
            right = bool(guesses) and guesses[-1] == secret
            reward = (1.0 if len(guesses) == 1 else self.later) if right else 0.0
            return dialogue.episode(Scored(reward, {"turns": len(dialogue.answers)}))

        return await context.each(play)
