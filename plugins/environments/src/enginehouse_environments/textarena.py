"""Games of textarena for one player, as a gymnasium environment that is registered when this module is imported.

Actions and observations are texts. A seed determines only how a game begins. Later random choices come from Python's
global generator, which all games of a process share.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

MOST_CHARACTERS = 1 << 16


class TextArena(gymnasium.Env[str, str]):
    """A game of textarena, by id, such as `"GuessTheNumber-v0-raw"`. With `-raw` each turn shows only new text."""

    observation_space = action_space = Text(MOST_CHARACTERS)

    def __init__(self, game: str):
        import textarena

        self._game: Any = textarena.make(game)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.reset(num_players=1, seed=seed)
        return self._observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn. Only the last turn has a reward, which is the reward of the whole game."""
        is_over, info = self._game.step(action)
        rewards = self._game.close()[0] if is_over else None
        return self._observe(), float((rewards or {}).get(0, 0.0)), is_over, False, dict(info)

    def _observe(self) -> str:
        _, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(message for _, message, kind in observation if kind.name != "PLAYER_ACTION").strip()


gymnasium.register("TextArena-v0", f"{__name__}:TextArena", disable_env_checker=True, order_enforce=False)
