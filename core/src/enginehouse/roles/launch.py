"""Options of starting the processes of roles, for any loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHORTEST_START_LIMIT_SECONDS = 300.0
"""A worker that imports its engine on a busy machine takes minutes, however quick its calls are."""


def start_seconds(call_seconds: float) -> float:
    """Return the time limit of a worker's start, by that of a call."""
    return max(call_seconds, SHORTEST_START_LIMIT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of starting the processes of all roles.

    Attributes:
        launcher: `"ray"`, or `"inline"`: all in this process.
        address: address of the Ray cluster to join; None: one is started on this machine.
        device: torch device type of every engine.
        device_is_asked: True if the user named the device; False if it was chosen by this machine's hardware.
        seed: base seed, from which each process gets its own.
        call_seconds: time limit of a worker's call.
        threads: threads of numeric libraries in each process; None: a number that suits the device.
        tokens_stay: see `RolloutFleet`.
        effect_tolerance: see `WeightSync`, in nats.
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
