"""Splits the seconds of a step among the causes for which the step waited, as far as its metrics show this."""

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
"""The causes for which a step may wait, and their names in a sentence."""
_OF_PHASES = {"old_logprobs": "actor", "score": "actor", "values": "critic"}


def split_waits(row: Mapping[str, Any], *, scored: bool) -> dict[str, float]:
    """Return the seconds of a step for each cause in `WORDS`. Unexplained seconds are attributed to the controller.

    Args:
        row: The step's metrics. Except for `time/step`, values that are no numbers count as 0.
        scored: True if a reward function scores responses; otherwise the phase `reward` measures the reward model.
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
        elif phase == "reward":  # the time after the last token was generated, or the reward model
            spent["reward" if scored else "reward_model"] += value
        else:
            cause = _OF_PHASES.get(phase, phase.partition("/")[0])
            spent[cause if cause in WORDS else "controller"] += value
    spent["turns"] += turns
    spent["controller"] += max(unexplained, 0.0)
    return spent


def _split_generation(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Split the seconds of generation between the replicas and the cause that left the replicas without requests."""
    answering = read_number(row, "rollout/busy_seconds") / max(read_number(row, "rollout/utilisation"), 1e-9)
    in_tools = read_number(row, "episode/in_tools")
    drawing = min(seconds * (1.0 - in_tools), answering)
    return {"rollout": drawing, "environment" if in_tools else "controller": seconds - drawing}


def read_number(row: Mapping[str, Any], name: str) -> float:
    """Return a number of a row, or 0 if the row does not have it."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
