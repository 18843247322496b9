"""Keep the groups whose rewards differ: of the others a comparison within the group learns nothing.

Source: DAPO (Yu et al. 2025), eq. 11, dynamic sampling: prompts whose samples are all right or all wrong are left out,
and others drawn until a batch is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.episodes.scored_group import total_reward

if TYPE_CHECKING:
    from enginehouse.engines.environment import Group


def mixed_rewards(group: Group) -> bool:
    """Whether not all rewards of the group are equal, those of tokens counted."""
    return len({total_reward(episode) for episode in group.episodes}) > 1
