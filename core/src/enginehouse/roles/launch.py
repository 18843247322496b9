"""How the processes of roles are started: what a loop asks for, whatever its config is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHORTEST_START_LIMIT_SECONDS = 300.0
"""A worker that imports its engine on a busy machine takes minutes, however quick its calls are."""


def start_seconds(call_seconds: float) -> float:
    """Return how long a worker may take until it is there, by how long a call may take."""
    return max(call_seconds, SHORTEST_START_LIMIT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the processes of all roles are started.

    Attributes:
        launcher: `"ray"`, or `"inline"`: all in this process.
        address: of the Ray cluster to join; None: one is started on this machine.
        device: torch device type of every engine.
        device_is_asked: whether somebody asked for the device, and it was not chosen by what this machine has.
        seed: from which each process has one of its own.
        call_seconds: how long a worker's call may take.
        threads: of numeric libraries in each process; None: as the device has it.
        tokens_stay: as of `RolloutFleet`.
        effect_tolerance: as of `WeightSync`, in nats.
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
        """How long a worker may take until it is there."""
        return start_seconds(self.call_seconds)
