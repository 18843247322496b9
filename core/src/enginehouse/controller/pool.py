"""Resource pools: how many processes on how many nodes, and what each may use. Ray placement groups underneath."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginehouse.controller.errors import ControllerError, PlacementError

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one process of a group goes: a bundle of a placement group, and its share of it."""

    placement_group: Any
    bundle: int
    cpus: float
    gpus: float


class ResourcePool:
    """Processes and what they may use, reserved together when the first worker group is launched on them.

    Args:
        processes_per_node: processes on each node, one entry a node; entries may differ. The processes of an entry
            are on one node; several entries may share a node that is large enough.
        gpus_per_process: GPUs of each process.
        cpus_per_process: CPUs of each process, in Ray's count; may be a fraction.
        max_colocate: how many groups may sit on the pool at once, as processes of their own that share its GPUs.
        name: for messages.
        timeout: seconds to wait for the cluster to give what is asked.
    """

    def __init__(
        self,
        processes_per_node: Sequence[int] = (1,),
        *,
        gpus_per_process: float = 0,
        cpus_per_process: float = 1,
        max_colocate: int = 1,
        name: str | None = None,
        timeout: float = 60.0,
    ):
        self.processes_per_node = tuple(processes_per_node)
        if not self.processes_per_node or any(count < 1 for count in self.processes_per_node):
            raise ControllerError(
                f"processes_per_node needs one positive number a node, not {list(processes_per_node)}"
            )
        if (
            max_colocate < 1
            or gpus_per_process < 0
            or cpus_per_process < 0
            or not (gpus_per_process or cpus_per_process)
        ):
            raise ControllerError(
                "a pool needs max_colocate of at least 1 and a positive number of CPUs or GPUs a process, not "
                f"{max_colocate=}, {cpus_per_process=}, {gpus_per_process=}"
            )
        self.gpus_per_process = gpus_per_process
        self.cpus_per_process = cpus_per_process
        self.max_colocate = max_colocate
        self.name = name or f"pool{next(_numbers)}"
        self.timeout = timeout
        self._lock = threading.Lock()
        self._groups: list[str] = []
        self._placement_groups: list[Any] = []

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.processes_per_node)

    @property
    def bundle(self) -> dict[str, float]:
        """What is reserved for each process (of every group on the pool together), in Ray's words."""
        resources = {"CPU": self.cpus_per_process * self.max_colocate, "GPU": self.gpus_per_process}
        return {name: amount for name, amount in resources.items() if amount}

    def occupy(self, group: str) -> list[Slot]:
        """Take a place on the pool for a group: one slot a rank.

        Raises:
            PlacementError: `max_colocate` groups are on it already, or the cluster does not give what is asked
                within the pool's timeout.
        """
        with self._lock:
            if len(self._groups) >= self.max_colocate:
                raise PlacementError(
                    f"pool {self.name!r} holds {self.max_colocate} group(s) at once and has {', '.join(self._groups)}; "
                    f"shut one down, colocate them in one process, or raise max_colocate to place {group!r} as well"
                )
            if not self._placement_groups:
                self._placement_groups = self._place()
            self._groups.append(group)
            gpus = self.gpus_per_process / self.max_colocate
            return [
                Slot(placement_group, bundle, self.cpus_per_process, gpus)
                for placement_group, count in zip(self._placement_groups, self.processes_per_node)
                for bundle in range(count)
            ]

    def leave(self, group: str) -> None:
        """Give a group's place back; what the pool reserved stays reserved."""
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)

    def shutdown(self) -> None:
        """Give everything back to the cluster. Groups still on the pool lose their processes; shut them down first."""
        with self._lock:
            self._remove(self._placement_groups)
            self._placement_groups = []
            self._groups.clear()

    def __repr__(self) -> str:
        return f"ResourcePool({self.name!r}, processes_per_node={list(self.processes_per_node)}, {self.bundle} each)"

    def _place(self) -> list[Any]:
        import ray
        from ray.util import placement_group

        if not ray.is_initialized():
            raise ControllerError(
                f"pool {self.name!r}: Ray is not running; call enginehouse.controller.start_ray() first"
            )
        deadline = time.monotonic() + self.timeout
        self._refuse_the_impossible()
        groups = [placement_group([self.bundle] * count, "STRICT_PACK") for count in self.processes_per_node]
        try:
            for group in groups:
                if not group.wait(timeout_seconds=max(deadline - time.monotonic(), 0.001)):
                    raise PlacementError(f"not placed within {self.timeout:g} s: {self._asked()}. {_cluster()}")
        except BaseException:
            self._remove(groups)
            raise
        # a pool that nobody holds any more must not keep its reservation; at exit Ray gives everything back anyway
        weakref.finalize(self, self._remove, groups).atexit = False
        return groups

    def _refuse_the_impossible(self) -> None:
        """Say at once what a cluster of fixed size, started here, can never give."""
        from enginehouse.controller.cluster import is_owned

        if not is_owned():
            return
        nodes = [node["Resources"] for node in _nodes()]
        for count in self.processes_per_node:
            needed = {name: amount * count for name, amount in self.bundle.items()}
            if not any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
                raise PlacementError(f"no node is large enough: {self._asked()}. {_cluster()}")

    def _asked(self) -> str:
        each = _amounts(self.bundle)
        asked = " and ".join(f"{count} processes on one node" for count in self.processes_per_node)
        return f"pool {self.name!r} asks for {asked}, {each} each"

    @staticmethod
    def _remove(groups: Sequence[Any]) -> None:
        import ray
        from ray.util import remove_placement_group

        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _cluster() -> str:
    """What the cluster has, in words."""
    import ray

    nodes = _nodes()
    total = "; ".join(f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}" for node in nodes)
    return f"The cluster has {len(nodes)} node(s) ({total}), free now: {_amounts(ray.available_resources())}."


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in resources) or "no CPU"
