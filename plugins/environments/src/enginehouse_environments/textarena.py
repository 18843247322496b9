"""Games of textarena for one player, as an environment of gymnasium; registered there when this is imported.

Texts go in and out. A seed decides what a game draws at its beginning: its games draw from Python's own generator,
which others in the process do too.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

MOST_CHARACTERS = 1 << 16


class TextArena(gymnasium.Env[str, str]):
    """A game of textarena.

    Args:
        game: its id, as `"GuessTheNumber-v0-raw"`; the ids that end in `-raw` say at each turn what is new.
    """

    observation_space = action_space = Text(MOST_CHARACTERS)

    def __init__(self, game: str):
        import textarena

        self._game: Any = textarena.make(game)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """See gymnasium."""
        super().reset(seed=seed)
        self._game.reset(num_players=1, seed=seed)
        return self._seen(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See gymnasium. The reward is that of the whole game, at its end."""
        is_over, info = self._game.step(action)
        rewards = self._game.close()[0] if is_over else None
        return self._seen(), float((rewards or {}).get(0, 0.0)), is_over, False, dict(info)

    def _seen(self) -> str:
        _, seen = self._game.get_observation()
        if isinstance(seen, str):
            return seen
        return "\n".join(message for _, message, kind in seen if kind.name != "PLAYER_ACTION").strip()


gymnasium.register("TextArena-v0", f"{__name__}:TextArena", disable_env_checker=True, order_enforce=False)
