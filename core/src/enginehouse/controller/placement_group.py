"""The Ray placement groups of a pool, one per node, and the leases of their bundles.

A bundle is the place of one process, or of `max_colocate` processes of different worker groups. Each pool has its own
placement groups. Only a pool that was merged or split from other pools has none: it leases the bundles of these pools.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import ControllerError, PlacementError
from enginehouse.controller.ray_access import ray_access

if TYPE_CHECKING:
    from enginehouse.controller.pool import ResourcePool

UNITS = 10_000
"""Number of units of a CPU or GPU in Ray's count. Shares are rounded to units, so that all shares of a bundle fit."""
POLL_SECONDS = 0.05

_leases_lock = threading.Lock()
"""Guards the leases of all bundles, because a merged pool leases bundles of several pools at once."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A process's share of a bundle of a placement group.

    Attributes:
        cpus: number of CPUs that Ray counts for the process.
        gpus: number of GPUs that Ray assigns to the process: a whole number, or a fraction of one GPU; 0 for a guest.
        devices: ids of the GPUs that a guest sees, although Ray assigns no GPUs to a guest. None: the process is not a
            guest, and sees the GPUs that Ray assigns.
    """

    placement_group: Any
    bundle: int
    cpus: float
    gpus: float
    devices: tuple[str, ...] | None = None


class PlacementGroups:
    """The bundles that one pool reserves, in one placement group per node.

    Args:
        processes_per_node: number of bundles on each node.
        gpus_per_process: number of GPUs of each bundle, which the processes on the bundle share.
        max_colocate: maximum number of groups that lease a bundle.
        guests: maximum number of further groups without their own GPUs.

    Attributes:
        devices: ids of the GPUs that the process on a bundle uses, by the bundle's index.
    """

    def __init__(
        self,
        name: str,
        processes_per_node: Sequence[int],
        cpus_per_process: float,
        gpus_per_process: float,
        max_colocate: int,
        guests: int = 0,
    ):
        self.name = name
        self.processes_per_node = tuple(processes_per_node)
        self.max_colocate = max_colocate + guests
        self.devices: dict[int, tuple[str, ...]] = {}
        cpu_units = round(cpus_per_process * UNITS)
        self._cpus = cpu_units / UNITS
        self._gpus = int(gpus_per_process * UNITS + 1e-6) // max_colocate / UNITS
        resources = {"CPU": cpu_units * self.max_colocate / UNITS, "GPU": gpus_per_process}
        self.bundle = {resource: amount for resource, amount in resources.items() if amount}
        self._where = [(node, bundle) for node, count in enumerate(processes_per_node) for bundle in range(count)]
        self._leases = self._no_leases()
        self._placing = threading.Lock()
        self._lock = threading.Lock()
        """Guards the attributes below. Held only briefly."""
        self._placement_groups: list[Any] = []
        self._given_back = 0
        # The bundles of a garbage-collected object must not stay reserved. At exit Ray frees everything anyway.
        self._to_remove: list[Any] = []
        weakref.finalize(self, remove, self._to_remove).atexit = False

    def __len__(self) -> int:
        return len(self._where)

    @property
    def is_placed(self) -> bool:
        return bool(self._placement_groups)

    def _no_leases(self) -> list[weakref.WeakKeyDictionary[Lease, None]]:
        """Return an empty collection of leases for each bundle. It keeps the order in which groups leased the bundle,
        and forgets the lease of a deleted group."""
        return [weakref.WeakKeyDictionary() for _ in self._where]

    def tenants(self, index: int) -> list[str]:
        with _leases_lock:
            return [lease.group for lease in self._leases[index]]

    def slot(self, index: int) -> Slot:
        """Return the slot of a process on a bundle, after `place`."""
        node, bundle = self._where[index]
        return Slot(self._placement_groups[node], bundle, self._cpus, self._gpus)

    def guest_slot(self, indices: Sequence[int]) -> Slot:
        """Return the slot of a guest that uses the devices of several bundles on one node."""
        devices = tuple(device for index in indices for device in self.devices.get(index, ()))
        return replace(self.slot(indices[0]), gpus=0.0, devices=devices)

    def place(self, deadline: float, timeout: float) -> bool:
        """Reserve the bundles, or wait until Ray has placed the bundles of a lost node again.

        Args:
            deadline: `time.monotonic()` at which the wait ends.
            timeout: the same limit in seconds, for the message.

        Returns:
            True if this call reserved the bundles, False if they were reserved before.

        Raises:
            PlacementError: the cluster does not provide the bundles in time, or another thread gives them back.
            ControllerError: Ray is not running, or is being shut down.
        """
        import ray

        if not ray.is_initialized():
            raise ControllerError(
                f"pool {self.name!r}: Ray is not running; call enginehouse.controller.start_ray() first"
            )
        with self._placing, ray_access:
            with self._lock:
                groups, given_back = list(self._placement_groups), self._given_back
            if groups:
                self._wait(groups, deadline, timeout, given_back)
                return False
            self._remove()  # groups that Ray did not remove before
            self._refuse_the_impossible()
            self._ask(deadline, timeout, given_back)
            return True

    def give_back(self) -> None:
        """Give the bundles back to the cluster, which ends the processes on them. `place` reserves them again.

        A thread that waits in `place` soon fails. If Ray does not remove the groups now, the next call of this method
        or of `place` tries again.
        """
        with self._lock:
            self._given_back += 1
            self._to_remove += [group for group in self._placement_groups if group not in self._to_remove]
            self._placement_groups = []
            with _leases_lock:
                self._leases = self._no_leases()
        self._remove()

    def _remove(self) -> None:
        """Remove the groups that were given back and still exist."""
        with self._lock:
            groups = [group for group in self._to_remove if group not in self._placement_groups]
        if groups and ray_access.end("give placement groups back", lambda: remove(groups)):
            with self._lock:
                self._to_remove[:] = [group for group in self._to_remove if group not in groups]

    def give_back_if_empty(self) -> None:
        """Give the bundles back unless a group leases one of them."""
        if not any(self._leases):
            self.give_back()

    def _ask(self, deadline: float, timeout: float, given_back: int) -> None:
        """Reserve the placement groups one after the other, the largest first. A small group then cannot take the node
        that a large group needs."""
        from ray.util import placement_group

        asked: list[Any] = [None] * len(self.processes_per_node)
        try:
            for node in sorted(range(len(asked)), key=lambda node: -self.processes_per_node[node]):
                count = self.processes_per_node[node]
                asked[node] = placement_group([self.bundle] * count, "STRICT_PACK")
                self._wait(asked, deadline, timeout, given_back)
            with self._lock:
                self._check_held(given_back)
                self._placement_groups = asked
                self._to_remove += asked
        except BaseException:
            remove([group for group in asked if group is not None])
            raise

    def _check_held(self, given_back: int) -> None:
        if self._given_back != given_back:
            raise PlacementError(f"pool {self.name!r} was shut down while a worker group waited for its places")

    def _wait(self, groups: Sequence[Any], deadline: float, timeout: float, given_back: int) -> None:
        """Wait until Ray has placed all groups. Skip entries that are None: these groups were not requested yet."""
        for group in groups:
            while group is not None and (state := _state(group)) != "CREATED":
                ray_access.check()
                self._check_held(given_back)
                if state == "REMOVED":
                    raise PlacementError(
                        f"a placement group of pool {self.name!r} was removed, but not by the pool; create a new pool"
                    )
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    sizes = zip(self.processes_per_node, groups)
                    missing = [size for size, group in sizes if group is not None and _state(group) != "CREATED"]
                    raise PlacementError(
                        f"not placed within {timeout:g} s: {self._asked(missing)}. {describe_cluster()}"
                    )
                if state == "LOST":  # Ray reports a lost node before its bundles
                    time.sleep(POLL_SECONDS)
                elif not group.wait(timeout_seconds=min(seconds, 1.0)):
                    gc.collect()  # reference cycles may keep unused pools alive and reserved

    def _refuse_the_impossible(self) -> None:
        """Raise at once if the cluster has one node, was started here, and is too small."""
        from enginehouse.controller.cluster import is_owned

        if not is_owned():
            return
        resources = [node["Resources"] for node in _nodes()]
        needed = {name: amount * len(self) for name, amount in self.bundle.items()}
        if not any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in resources):
            raise PlacementError(f"this machine is not large enough: {self._asked()}. {describe_cluster()}")

    def _asked(self, missing: Sequence[int] = ()) -> str:
        text = f"pool {self.name!r} asks for {_counts(self.processes_per_node)}, {_amounts(self.bundle)} each"
        if missing and len(missing) < len(self.processes_per_node):
            text += f"; of these {_counts(missing)} could not be placed"
        return text


class Lease:
    """A worker group's bundles on a pool, one per rank, until `end`. Two groups with the same name have two leases.

    Args:
        pool: the pool. Its current `timeout` limits the wait for the cluster.
        bundles: bundle of each rank.
        guest_of: the bundles whose devices a guest uses.
    """

    def __init__(
        self,
        pool: ResourcePool,
        group: str,
        bundles: Sequence[Bundle],
        guest_of: tuple[PlacementGroups, Sequence[int]] | None = None,
    ):
        self.group = group
        self._pool = pool
        self._bundles = bundles
        self._guest_of = guest_of

    @property
    def slots(self) -> list[Slot]:
        if self._guest_of is not None:
            groups, indices = self._guest_of
            return [groups.guest_slot(indices)]
        return [groups.slot(index) for groups, index in self._bundles]

    def note_devices(self, devices: Sequence[tuple[str, ...]]) -> None:
        """Store the GPUs of each rank for its guests."""
        if self._guest_of is None:
            for (groups, index), own in zip(self._bundles, devices, strict=True):
                groups.devices[index] = own

    def begin(self) -> None:
        """Lease the bundles and reserve them. Raises `PlacementError` if other groups lease them, or the cluster does
        not provide them within the pool's timeout."""
        self._take()
        reserved: list[PlacementGroups] = []
        deadline = time.monotonic() + self._pool.timeout
        try:
            # the largest first, as in `PlacementGroups._ask`
            for groups in sorted(self._placement_groups(), key=lambda groups: -max(groups.processes_per_node)):
                if groups.place(deadline, self._pool.timeout):
                    reserved.append(groups)
        except BaseException:
            self.end()
            for groups in reserved:
                groups.give_back_if_empty()
            raise

    def renew(self) -> None:
        """Wait until Ray has placed the bundles of a lost node again. After the pool's shutdown, lease the bundles
        again. Raises `PlacementError` if the cluster does not provide them within the pool's timeout, or other groups
        leased them after the pool's shutdown."""
        self._take()
        deadline = time.monotonic() + self._pool.timeout
        for groups in self._placement_groups():
            groups.place(deadline, self._pool.timeout)

    def end(self) -> None:
        """End the lease. The bundles stay reserved."""
        with _leases_lock:
            for groups, index in self._bundles:
                groups._leases[index].pop(self, None)

    def _take(self) -> None:
        """Lease all missing bundles, or raise a `PlacementError` and lease none if a bundle has no free lease."""
        with _leases_lock:
            free = [(groups, index) for groups, index in self._bundles if self not in groups._leases[index]]
            full = [(groups, index) for groups, index in free if len(groups._leases[index]) >= groups.max_colocate]
            if full:
                names = sorted({lease.group for groups, index in full for lease in groups._leases[index]})
                most = min(groups.max_colocate for groups, _ in full)
                some = "" if len(full) == len(self._bundles) else f" on {len(full)} of its {len(self._bundles)} places"
                raise PlacementError(
                    f"pool {self._pool.name!r} can hold {most} group(s) at once, but already has {', '.join(names)}"
                    f"{some}; to place {self.group!r} as well, shut a group down, colocate groups in the same "
                    "processes, or raise max_colocate"
                )
            for groups, index in free:
                groups._leases[index][self] = None

    def _placement_groups(self) -> list[PlacementGroups]:
        return list(dict.fromkeys(groups for groups, _ in self._bundles))


Bundle = tuple[PlacementGroups, int]
"""The place of one process: placement groups of a pool, and the index of a bundle in them."""


def remove(groups: Sequence[Any]) -> None:
    """Remove placement groups, if Ray still runs."""
    if not groups:
        return
    import ray
    from ray.util import remove_placement_group

    if ray.is_initialized():
        for group in groups:
            remove_placement_group(group)


class Room:
    """A snapshot of the resources of a cluster's nodes, less the resources that roles of a run take from it. Ray's own
    counts are outdated just after groups are placed or removed."""

    def __init__(self, total: Mapping[str, Mapping[str, float]], free: Mapping[str, Mapping[str, float]]):
        self._total = {node: dict(resources) for node, resources in total.items()}
        self._free = {node: dict(free.get(node, {})) for node in total}

    @classmethod
    def of_cluster(cls) -> Room:
        """Take the snapshot of the connected cluster."""
        return cls({node["NodeID"]: node["Resources"] for node in _nodes()}, _free())

    def take(self, processes: int, gpus_each: float, cpus_each: float = 1.0, together: int = 1) -> list[int]:
        """Take resources for a role's processes: on one node if it is large enough, else on as few nodes as possible.

        If the free resources do not suffice, resources in use are taken as well, and the run later waits for them.

        Args:
            gpus_each: number of GPUs of each process, all on one node.
            cpus_each: number of CPUs that Ray counts for each process.
            together: each node gets a multiple of this many processes, if possible; see `ResourcePool.guests`.

        Returns:
            Number of processes on each node, the largest first.

        Raises:
            PlacementError: the cluster is too small, even if all its resources were free.
        """
        asked = {name: amount for name, amount in (("GPU", gpus_each), ("CPU", cpus_each)) if amount}

        def places(resources: Mapping[str, float], multiple: int) -> int:
            number = int(min(resources.get(name, 0.0) // amount for name, amount in asked.items()))
            return number if number >= processes else number // multiple * multiple

        most = 0
        for capacity, multiple in product((self._free, self._total), dict.fromkeys((together, 1))):
            rooms = {node: places(resources, multiple) for node, resources in capacity.items()}
            if (most := sum(rooms.values())) >= processes:
                return self._take(rooms, processes, asked)
        raise PlacementError(
            f"the cluster is not large enough for {processes} processes that each need {_amounts(asked)} on one node: "
            f"besides the other roles of the run, it has room for {most} of them. {describe_cluster()}"
        )

    def _take(self, rooms: Mapping[str, int], processes: int, each: Mapping[str, float]) -> list[int]:
        parts: list[int] = []
        # the fullest node that has room for all processes; else the nodes with most room first
        for node in sorted(rooms, key=lambda node: (rooms[node] < processes, abs(rooms[node] - processes))):
            parts.append(min(rooms[node], processes - sum(parts)))
            for resources in (self._free[node], self._total[node]):
                for name, amount in each.items():
                    resources[name] = resources.get(name, 0.0) - amount * parts[-1]
        return [part for part in parts if part]


def count_gpus() -> int:
    """Return the number of GPUs in the cluster, free or not."""
    return int(sum(node["Resources"].get("GPU", 0.0) for node in _nodes()))


def cores_per_gpu() -> int:
    """Return the number of cores per GPU of the node with the fewest cores per GPU, but at least 1."""
    from enginehouse.controller.cluster import count_cores, is_owned

    shares = []
    for node in _nodes():
        cores, gpus = node["Resources"].get("CPU", 1.0), node["Resources"].get("GPU", 0.0)
        if is_owned():  # Ray counts more cores than the machine has
            cores = min(cores, count_cores())
        if gpus:
            shares.append(cores // gpus)
    return max(int(min(shares, default=1)), 1)


def _free() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources by node, or an empty dict if Ray does not know them."""
    with suppress(Exception):  # an internal function of Ray; without it callers use the sum over all nodes
        from ray._private.state import available_resources_per_node

        return available_resources_per_node()
    return {}


def describe_cluster() -> str:
    """Describe the resources of each node of the cluster, and the free part of them."""
    import ray

    free, nodes = _free(), _nodes()
    texts = []
    for node in nodes:
        resources = node["Resources"]
        texts.append(f"{node['NodeManagerAddress']}: {_amounts(resources)}")
        if node["NodeID"] in free:
            free_here = free[node["NodeID"]]
            texts[-1] += f", of which free: {_amounts({name: free_here.get(name, 0.0) for name in resources})}"
    total = _amounts(ray.available_resources())
    return f"The cluster has {len(nodes)} node(s) ({'; '.join(texts)}), free now: {total}."


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def find_nodes(slots: Sequence[Slot]) -> set[str]:
    """Return Ray's ids of the nodes that hold `slots`."""
    from ray.util import placement_group_table

    tables = {slot.placement_group.id: placement_group_table(slot.placement_group) for slot in slots}
    return {tables[slot.placement_group.id]["bundles_to_node_id"][slot.bundle] for slot in slots}


def _state(group: Any) -> str:
    """Return Ray's state of a placement group, or LOST for CREATED on a node that has left."""
    from ray.util import placement_group_table

    table = placement_group_table(group)
    state = str(table.get("state", "REMOVED"))
    if state != "CREATED":
        return state
    alive = {node["NodeID"] for node in _nodes()}
    return state if set(table["bundles_to_node_id"].values()) <= alive else "LOST"


def _counts(counts: Sequence[int]) -> str:
    return " and ".join(f"{count} process{'es' * (count > 1)} on one node" for count in counts)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in resources) or "no CPU"
