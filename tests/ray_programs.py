"""Programs beside the tests': a process is connected to one Ray cluster only, and the tests' own is taken."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 240.0
"""Seconds after which a test gives a program up: far more than any needs, so that a hang ends."""

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}
"""Ray's own settings, so that it notices in a second or two that a node is gone, and not in half a minute."""

STORE_BYTES = 100 << 20

_cluster: Any = None


class Program:
    """A process that runs functions one after the other, keeping its state between them."""

    def __init__(self) -> None:
        self._executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that can be imported; what it raises is raised here."""
        return self._executor.submit(function, *args).result(PATIENCE)

    def end(self) -> None:
        """End it in order."""
        self._executor.shutdown()

    def kill(self) -> None:
        """End it without giving it a chance to say anything."""
        for pid in list(self._executor._processes):
            os.kill(pid, signal.SIGKILL)
        self._executor.shutdown()


class ClusterProgram(Program):
    """A program that has a cluster of its own, of several nodes on this machine, and is connected to it.

    Args:
        nodes: resources of each node, as `num_cpus` and `num_gpus`; the program runs on the first.
    """

    def __init__(self, *nodes: dict[str, int]) -> None:
        super().__init__()
        self.address: str = self.run(_start_cluster, nodes)

    def end(self) -> None:
        """End the nodes, and the program."""
        try:
            self.run(_stop_cluster)
        finally:
            super().end()


def _start_cluster(nodes: tuple[dict[str, int], ...]) -> str:
    global _cluster
    from ray.cluster_utils import Cluster

    from enginehouse.controller import start_ray

    head, *others = ({"object_store_memory": STORE_BYTES, **node} for node in nodes)
    _cluster = Cluster(
        initialize_head=True,
        head_node_args={**head, "_system_config": QUICK_TO_NOTICE, "include_dashboard": False},
    )
    for node in others:
        _cluster.add_node(**node)
    start_ray(_cluster.address)
    return str(_cluster.address)


def add_node(**resources: int) -> str:
    """Add a node, inside a `ClusterProgram`; returns Ray's id of it."""
    return str(_cluster.add_node(**resources, object_store_memory=STORE_BYTES).node_id)


def kill_node(node_id: str, and_wait: bool = False) -> None:
    """Kill the raylet of a node, inside a `ClusterProgram`; its workers end with it, soon after.

    Args:
        node_id: Ray's id of it.
        and_wait: whether to wait until Ray knows.
    """
    import ray

    node = next(node for node in _cluster.list_all_nodes() if node.node_id == node_id)
    _cluster.remove_node(node, allow_graceful=False)
    deadline = time.monotonic() + PATIENCE
    while and_wait and any(one["NodeID"] == node_id and one["Alive"] for one in ray.nodes()):
        assert time.monotonic() < deadline, "Ray did not notice that a node left"
        time.sleep(0.05)


def _stop_cluster() -> None:
    from enginehouse.controller import stop_ray

    stop_ray()
    _cluster.shutdown()
