"""Where a run's training and rollout roles are, as far as the choice of a weight transport depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What `enginehouse_pick_transport` is told about the cluster.

    Attributes:
        colocated: actor and rollout live in the same processes.
        hosts: number of hosts the two roles may be spread over; 2 stands for any more.
        device: torch device type of the weights, `"cpu"` or `"cuda"`.
        training_ranks: number of processes that train.
    """

    colocated: bool
    hosts: int = 1
    device: str = "cpu"
    training_ranks: int = 1
