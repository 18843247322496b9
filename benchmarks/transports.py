"""The two transports between hosts: one gathers a sharded model to broadcast it, the other sends the shards.

They run over loopback, which measures the work of senders and receivers, and no network. They take turns in each
layout.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import weight_update

LAYOUTS = ((1, 1), (1, 4), (2, 1), (2, 2), (2, 4))
"""Numbers of training ranks and replicas."""
TRANSPORTS = ("collective", "point_to_point")


def measure(parameters: int = 200_000_000, rounds: int = 5, repeats: int = 2) -> dict[str, Any]:
    """Update the weights of torch replicas from fsdp ranks, by each transport in turn.

    Args:
        parameters: approximate number of the model's parameters; each is 4 bytes.
        rounds: updates measured after each start.
        repeats: starts of each transport in each layout.

    Returns:
        `metrics`: `point_to_point_vs_collective_RANKS_REPLICAS`, the median seconds of a transfer by `collective` over
        those by `point_to_point`; above 1 if the latter is quicker. `sides`: the seconds of both.
    """
    metrics: dict[str, float] = {}
    sides: dict[str, dict[str, float]] = {}
    for ranks, replicas in LAYOUTS:
        seconds: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        for _ in range(repeats):
            for transport in TRANSPORTS:
                measured = weight_update.update(
                    parameters, rounds, ranks, replicas, train="fsdp", rollout="torch", transport=transport
                )
                seconds[transport].append(measured["sides"]["transfer"]["seconds"])
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        metrics[f"point_to_point_vs_collective_{ranks}_{replicas}"] = medians["collective"] / medians["point_to_point"]
        sides[f"{ranks} ranks, {replicas} replicas"] = medians
    return {"metrics": metrics, "sides": sides}
