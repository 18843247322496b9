"""Divides a step's seconds by what the step waited for, as far as its metrics tell."""

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
"""Each thing that a step may wait for, and its name in a sentence."""
_OF_PHASES = {"old_logprobs": "actor", "score": "actor", "values": "critic"}


def split_waits(row: Mapping[str, Any], *, scored: bool) -> dict[str, float]:
    """Return a step's seconds by the key of `WORDS` that the step waited for; unexplained seconds are the controller's.

    Args:
        row: The step's metrics; except for `time/step`, anything but a number counts as 0.
        scored: True if a reward function scores responses; else the phase `reward` is the reward model's.
    """
    spent: dict[str, float] = defaultdict(float)
    phases = {name: read_number(row, name) for name in row if name.startswith("time/") and name != "time/step"}
    turns = min(phases.pop("time/turns", 0.0), row["time/step"])
    unexplained = row["time/step"] - turns
    for name, value in phases.items():
        unexplained -= value
        phase = name.removeprefix("time/")
        if phase == "generate":
            for cause, part in _split_generation(row, value).items():
                spent[cause] += part
        elif phase == "update":
            busy = {name: read_number(row, name) for name in row if name.startswith("busy/update")}
            slowest = max(busy, key=lambda name: busy[name], default="")
            trained = min(value, busy.get(slowest, value))
            spent[slowest.removeprefix("busy/update").strip("/") or "actor"] += trained
            spent["controller"] += value - trained
        elif phase == "reward":  # the time after the last token was drawn, or the reward model
            spent["reward" if scored else "reward_model"] += value
        else:
            cause = _OF_PHASES.get(phase, phase.partition("/")[0])
            spent[cause if cause in WORDS else "controller"] += value
    spent["turns"] += turns
    spent["controller"] += max(unexplained, 0.0)
    return spent


def _split_generation(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Divide the seconds of generation between the replicas and what kept them without requests."""
    answering = read_number(row, "rollout/busy_seconds") / max(read_number(row, "rollout/utilisation"), 1e-9)
    in_tools = read_number(row, "episode/in_tools")
    drawing = min(seconds * (1.0 - in_tools), answering)
    return {"rollout": drawing, "environment" if in_tools else "controller": seconds - drawing}


def read_number(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a row, or 0 where the row has none."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
