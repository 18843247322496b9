"""Ends worker processes with their children. Ray's own `kill` ends only the process of an actor, and takes longer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from enginehouse.controller.cluster import end_processes
from enginehouse.controller.ray_access import ENDING_SECONDS, ray_access

log = logging.getLogger(__name__)

REACH_SECONDS = 15.0
"""Time limit in seconds for a node to start the task that ends processes. If it does not, only Ray's own `kill` is
used."""


def kill_workers(
    actors: Sequence[Any],
    local: Mapping[int, psutil.Process],
    elsewhere: Sequence[tuple[str, int, float]],
    patience: float,
) -> None:
    """Kill a group's processes, and end their children.

    Args:
        local: processes on this node, by rank.
        elsewhere: Ray's node id, the process id and the start (`time.time()`) of each process on other nodes.
        patience: seconds that the children have to end by themselves.
    """
    import ray

    family = list(local.values())
    for process in local.values():
        with suppress(psutil.Error):
            family += process.children(recursive=True)
    if not ray.is_initialized():
        end_processes(family, patience)
        return
    endings: list[Ending] = []

    def begin() -> None:
        if elsewhere:
            endings.append(Ending(elsewhere, patience))
        for rank, actor in enumerate(actors):
            if rank in local:
                ray.kill(actor, no_restart=True)

    def finish() -> None:
        for ending in endings:
            ending.wait()
        for actor in actors:
            ray.kill(actor, no_restart=True)

    end_or_warn("kill workers", begin, ENDING_SECONDS)
    end_processes(family, 0.0 if ray_access.stuck else patience)
    end_or_warn("kill workers", finish, ENDING_SECONDS + (REACH_SECONDS + patience if endings else 0.0))


def end_or_warn(what: str, call: Callable[[], object], seconds: float) -> None:
    """Make a call through `RayAccess.end`. Errors of Ray are only logged, so that the next steps of a shutdown run."""
    try:
        ray_access.end(what, call, seconds)
    except Exception as error:
        log.warning("Ray could not %s: %s", what, error)


class Ending:
    """Ends processes on other nodes, and their children. It skips a node that has left.

    Args:
        processes: Ray's node id, the process id and the start (`time.time()`) of each process.
        patience: seconds that the children have to end by themselves.
    """

    def __init__(self, processes: Sequence[tuple[str, int, float]], patience: float):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._patience = patience
        self._tasks = []
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        task = ray.remote(num_cpus=0, max_retries=0)(_end_here)
        for node in {node for node, _, _ in processes} & alive:
            on_node = [(pid, started) for node_id, pid, started in processes if node_id == node]
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._tasks.append(task.options(scheduling_strategy=strategy).remote(on_node, patience))

    def wait(self) -> None:
        """Wait until the processes have ended, but at most `REACH_SECONDS` plus `patience`."""
        import ray

        if not self._tasks:
            return
        ended, late = ray.wait(self._tasks, num_returns=len(self._tasks), timeout=REACH_SECONDS + self._patience)
        for ref in late:
            ray.cancel(ref, force=True)
        for ref in ended:
            try:
                ray.get(ref, timeout=1.0)
            except Exception as error:  # a node that has left has no processes to end
                log.info("could not end processes on another node: %s", error)


def _end_here(processes: Sequence[tuple[int, float]], patience: float) -> None:
    heads = []
    children = []
    for pid, started in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1.0:
                heads.append(process)
                children += process.children(recursive=True)
    for process in heads:
        with suppress(psutil.Error):
            process.kill()
    end_processes([*heads, *children], patience)
