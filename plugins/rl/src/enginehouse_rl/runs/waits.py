"""What each second of a step was waited for, as far as its figures say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

WORDS = {
    "rollout": "the rollout engine",
    "reward": "the reward",
    "environment": "the environment and its tools",
    "actor": "the actor",
    "critic": "the critic",
    "reference": "the reference",
    "reward_model": "the reward model",
    "stages": "stages of plugins",
    "sync": "the weight updates",
    "turns": "giving devices over from role to role",
    "controller": "the controller",
    "validation": "validations",
    "checkpoint": "checkpoints",
}
"""What may be waited for."""
_OF_PHASES = {"old_logprobs": "actor", "score": "actor", "values": "critic"}


def waited_for(row: Mapping[str, Any], *, scored: bool) -> dict[str, float]:
    """A step's seconds, by what of `WORDS` was waited for. What no figure tells is the controller's.

    Args:
        row: the step's metrics; what is no number counts as 0, but for `time/step`.
        scored: whether a reward function scores responses; else the phase `reward` is the reward model's.
    """
    spent: dict[str, float] = defaultdict(float)
    phases = {name: number(row, name) for name in row if name.startswith("time/") and name != "time/step"}
    turns = min(phases.pop("time/turns", 0.0), row["time/step"])
    left = row["time/step"] - turns
    for name, value in phases.items():
        left -= value
        phase = name.removeprefix("time/")
        if phase == "generate":
            for who, part in _of_generation(row, value).items():
                spent[who] += part
        elif phase == "update":
            busy = {name: number(row, name) for name in row if name.startswith("busy/update")}
            slowest = max(busy, key=lambda name: busy[name], default="")
            trained = min(value, busy.get(slowest, value))
            spent[slowest.removeprefix("busy/update").strip("/") or "actor"] += trained
            spent["controller"] += value - trained
        elif phase == "reward":  # what is left of it once the last token is drawn, and the reward model
            spent["reward" if scored else "reward_model"] += value
        else:
            who = _OF_PHASES.get(phase, phase.partition("/")[0])
            spent[who if who in WORDS else "controller"] += value
    spent["turns"] += turns
    spent["controller"] += max(left, 0.0)
    return spent


def _of_generation(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """The seconds in which a step waited for its last token: for replicas, and for those that had none to answer."""
    answering = number(row, "rollout/busy_seconds") / max(number(row, "rollout/utilisation"), 1e-9)
    in_tools = number(row, "episode/in_tools")
    drawn = min(seconds * (1.0 - in_tools), answering)
    return {"rollout": drawn, "environment" if in_tools else "controller": seconds - drawn}


def number(row: Mapping[str, Any], name: str) -> float:
    """A figure of a row; 0 where it has none."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
