"""Ending processes on other nodes, with all they started. Ray's own `kill` ends an actor's process alone, and later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import psutil

from enginehouse.controller.cluster import end_processes

log = logging.getLogger(__name__)

REACH_SECONDS = 15.0
"""How long a node gets to start the task that ends processes there; after it, Ray's own `kill` has to do."""


class Ending:
    """Processes on other nodes that are being ended, and what they started; a node that has left is passed over.

    Args:
        processes: of each, Ray's id of its node, its process id, and when it began (`time.time()`).
        patience: seconds the processes it started get to end by themselves.
    """

    def __init__(self, processes: Sequence[tuple[str, int, float]], patience: float):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._patience = patience
        self._asked = []
        if not processes:
            return
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        task = ray.remote(num_cpus=0, max_retries=0)(_end_here)
        for node in {node for node, _, _ in processes} & alive:
            there = [(pid, started) for node_id, pid, started in processes if node_id == node]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._asked.append(task.options(scheduling_strategy=strategy).remote(there, patience))

    def wait(self) -> None:
        """Wait until they are gone, or a node has not got to it in `REACH_SECONDS`."""
        import ray

        if not self._asked:
            return
        ended, late = ray.wait(self._asked, num_returns=len(self._asked), timeout=REACH_SECONDS + self._patience)
        for ref in late:
            ray.cancel(ref, force=True)
        for ref in ended:
            try:
                ray.get(ref, timeout=1.0)
            except Exception as error:  # a node that leaves takes its processes along
                log.info("could not end processes on another node: %s", error)


def _end_here(processes: Sequence[tuple[int, float]], patience: float) -> None:
    """Runs on the node of the processes."""
    heads = []
    started_by_them = []
    for pid, started in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1.0:
                heads.append(process)
                started_by_them += process.children(recursive=True)
    for process in heads:
        with suppress(psutil.Error):
            process.kill()
    end_processes([*heads, *started_by_them], patience)
