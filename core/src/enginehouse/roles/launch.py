"""Options for starting the processes of roles, for any training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHORTEST_START_LIMIT_SECONDS = 300.0
"""Least time limit of a start, because a worker on a busy machine imports its engine for minutes."""


def start_seconds(call_seconds: float) -> float:
    """Return the time limit of a worker's start, from the time limit of a call."""
    return max(call_seconds, SHORTEST_START_LIMIT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options for starting the processes of all roles.

    Attributes:
        launcher: `"ray"`, or `"inline"` for all roles in this process.
        address: address of the Ray cluster to join; None starts a cluster on this machine.
        device: torch device type of every engine.
        device_is_asked: True if the user named the device; False if this machine's hardware decided.
        seed: base seed, from which each process derives its own.
        effect_tolerance: as in `WeightSync`; None: `enginehouse.roles.role_plan.default_tolerance`.
        threads: number of threads that numeric libraries use in each process; None: a number that suits the device.
    """

    launcher: Literal["ray", "inline"] = "ray"
    address: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    device_is_asked: bool = True
    seed: int = 0
    call_seconds: float = 600.0
    threads: int | None = None
    tokens_stay: bool = False
    effect_tolerance: float | None = None

    @property
    def start_seconds(self) -> float:
        """Time limit of a worker's start."""
        return start_seconds(self.call_seconds)
