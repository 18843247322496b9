"""The placement of a run's training and rollout roles, as far as the choice of a weight transport depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Description of the processes and devices of a run, which `enginehouse_pick_transport` gets as `cluster`.

    Attributes:
        colocated: True if actor and rollout share their processes.
        hosts: number of hosts that the two roles may use; 2 stands for two or more.
        device: torch device type of the weights, `"cpu"` or `"cuda"`.
        training_ranks: number of training processes.
    """

    colocated: bool
    hosts: int = 1
    device: str = "cpu"
    training_ranks: int = 1
