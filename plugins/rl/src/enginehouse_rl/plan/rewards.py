from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginehouse_rl.config.schema import NamedRewardConfig
from enginehouse_rl.metrics import read_metrics

REWARD_GETS = ("prompt", "messages", "response", "response_tokens", "finish_reason")
"""The arguments that the run passes to a reward if it takes them, besides the columns of the data."""
_OWN = [
    metric.name.split("/", 1)[1] for metric in read_metrics().values() if metric.section in {"Rewards", "Validation"}
]
RESERVED = tuple(dict.fromkeys(name for name in _OWN if "<" not in name and name != "reward"))
"""Names under `reward/` or `validation/` that belong to the run, so that a reward may not report them as metrics."""
RESERVED_BEGINNINGS = tuple(dict.fromkeys(name.split("<")[0] for name in _OWN if "@" in name))
"""First parts of the names under `validation/` that belong to the run."""


@dataclass(frozen=True)
class RewardPlan:
    """A reward of a run.

    Attributes:
        name: the name under which its scores are logged; empty for the only reward of a run.
        function: `"module:function"`.
        arguments: the arguments of the function. If the config has the value of a member of an `Enum`, the argument is
            the member.
    """

    name: str
    function: str
    arguments: Mapping[str, Any]
    section: NamedRewardConfig

    @property
    def key(self) -> str:
        return make_reward_key(self.name)

    def clip(self, score: float) -> float:
        """Return a score, clipped to the bounds of `reward.clip`."""
        low, high = self.section.clip or (score, score)
        return min(max(score, low), high)


def make_reward_key(name: str) -> str:
    """Return the config key of the reward `name`; an empty name means the only reward."""
    return f"reward.functions.{name}" if name else "reward"


def is_reserved(name: str) -> bool:
    """True if the run itself has a metric of this name."""
    return name in RESERVED or name.startswith(RESERVED_BEGINNINGS)
