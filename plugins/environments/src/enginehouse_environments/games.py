"""A game to learn, and to learn from: guess a number in two turns, with a hint between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from enginehouse.engines.environment import Scored
from enginehouse.errors import DataError
from enginehouse_environments.dialogue import ChatTemplate, Dialogue

if TYPE_CHECKING:
    from enginehouse.engines.environment import Episode, EpisodeContext, Policy, Task


class GuessingGame:
    """Guess the number in the column `secret`: after a wrong guess it is said whether it is higher or lower.

    The last whole number of an answer is the guess; an answer without one ends the game.

    Args:
        turns: guesses there are.
        later: reward of a guess that is right at a later turn than the first; at the first it is 1.
    """

    def __init__(self, turns: Annotated[int, Field(ge=1)] = 2, later: float = 1.0):
        self.turns, self.later = turns, later

    async def run(self, task: Task, policy: Policy, context: EpisodeContext) -> Sequence[Episode]:
        """See the protocol."""
        template = ChatTemplate(policy.tokenizer)
        messages = task.messages or [{"role": "user", "content": task.prompt}]
        secret = task.columns.get("secret")
        if not isinstance(secret, int):
            raise DataError(f"guessing_game needs a whole number in the column 'secret' of each row, not {secret!r}")

        async def play(number: int, policy: Policy) -> Episode:
            dialogue = Dialogue(template, messages, task.prompt_ids)
            guesses: list[int] = []
            for turn in range(self.turns):
                if turn:
                    dialogue.say([{"role": "user", "content": "higher" if secret > guesses[-1] else "lower"}])
                await dialogue.answer(policy)
                said = re.findall(r"-?\d+", dialogue.last)
                if not said:
                    break
                guesses.append(int(said[-1]))
                if guesses[-1] == secret:
                    break
            right = bool(guesses) and guesses[-1] == secret
            reward = (1.0 if len(guesses) == 1 else self.later) if right else 0.0
            return dialogue.episode(Scored(reward, {"turns": len(dialogue.answers)}))

        return await context.each(play)
