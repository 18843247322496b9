"""The rewards of a run, checked: what each is called with, and how they make one number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginehouse_rl.config.schema import NamedRewardConfig

REWARD_GETS = ("prompt", "messages", "response", "response_tokens", "finish_reason")
"""Names that a reward may take besides the data set's columns; it has to take `reward.arguments`."""
RESERVED = (
    *("mean", "std", "max", "min", "groups_all_equal", "failures", "model"),
    *("reward_stderr", "tokens_mean", "truncated", "dropped"),
)
"""Names under `reward/` or `validation/` that are the run's own, so that no figure of a reward may have them."""
RESERVED_BEGINNINGS = ("mean@", "pass@", "majority@")
"""Beginnings of the names under `validation/` that are the run's own."""


@dataclass(frozen=True)
class RewardPlan:
    """One of a run's rewards.

    Attributes:
        name: by which its scores are logged; empty for the only one of a run.
        function: `"module:function"`.
        arguments: as the function takes them: the member of an `Enum`, where the config has its value.
        given: what the config says of it.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    given: NamedRewardConfig

    @property
    def key(self) -> str:
        """Its section of the config."""
        return key_of(self.name)

    def clipped(self, score: float) -> float:
        """A score within its bounds."""
        low, high = self.given.clip or (score, score)
        return min(max(score, low), high)


def key_of(name: str) -> str:
    """The section of the config of the reward of this name, empty for the only one."""
    return f"reward.functions.{name}" if name else "reward"


def is_reserved(name: str) -> bool:
    """Return whether a metric of the run's own has this name."""
    return name in RESERVED or name.startswith(RESERVED_BEGINNINGS)
