"""Keeps the groups whose rewards differ, because comparing equal rewards teaches nothing.

Source: DAPO (Yu et al. 2025), eq. 11, dynamic sampling: prompts whose samples are all right or all wrong are left out,
and other prompts replace them until a batch is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.episodes.scored_group import sum_rewards

if TYPE_CHECKING:
    from enginehouse.engines.environment import Group


def mixed_rewards(group: Group) -> bool:
    """Return True if the episodes of a group have different rewards, each including the rewards of its tokens."""
    return len({sum_rewards(episode) for episode in group.episodes}) > 1
