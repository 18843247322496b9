"""The rewards of a plan, each with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginehouse_rl.config.schema import NamedRewardConfig
from enginehouse_rl.metrics import read_metrics

REWARD_GETS = ("prompt", "messages", "response", "response_tokens", "finish_reason")
"""Names of the arguments that a reward may take besides the data set's columns."""
_OWN = [
    metric.name.split("/", 1)[1] for metric in read_metrics().values() if metric.section in {"Rewards", "Validation"}
]
RESERVED = tuple(dict.fromkeys(name for name in _OWN if "<" not in name and name != "reward"))
"""Names under `reward/` or `validation/` that belong to the run, so that no metric of a reward may have them."""
RESERVED_BEGINNINGS = tuple(dict.fromkeys(name.split("<")[0] for name in _OWN if "@" in name))
"""Beginnings of the names under `validation/` that belong to the run."""


@dataclass(frozen=True)
class RewardPlan:
    """A reward of a run.

    Attributes:
        name: the name under which its scores are logged; empty for the only one of a run.
        function: `"module:function"`.
        arguments: the arguments of the function; the member of an `Enum`, where the config has its value.
        section: its section of the config.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    section: NamedRewardConfig

    @property
    def key(self) -> str:
        """The key of its section of the config."""
        return make_reward_key(self.name)

    def clip(self, score: float) -> float:
        """Return a score within the bounds of `reward.clip`."""
        low, high = self.section.clip or (score, score)
        return min(max(score, low), high)


def make_reward_key(name: str) -> str:
    """Return the key of the section of the reward `name`, which is empty for the only one."""
    return f"reward.functions.{name}" if name else "reward"


def is_reserved(name: str) -> bool:
    """True if a metric of the run itself has this name."""
    return name in RESERVED or name.startswith(RESERVED_BEGINNINGS)
