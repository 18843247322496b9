"""Resource pools: processes on nodes, with the CPUs and GPUs of each, reserved by Ray placement groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.placement_group import Bundle, Lease, PlacementGroups

_numbers = itertools.count()


class ResourcePool:
    """Processes and their resources, reserved together at the first launch of a worker group on the pool.

    `shutdown` frees the resources. They are also freed once no reference is left to the pool and to all pools that were
    merged or split from it.

    Args:
        processes_per_node: number of processes of each entry. The processes of an entry are on one node. Several
            entries may share a node that is large enough.
        gpus_per_process: number of GPUs of each process: a whole number, or a fraction of one GPU.
        cpus_per_process: number of CPUs that Ray counts for each process; may be a fraction.
        max_colocate: maximum number of groups on the pool at once. Each group has its own processes, which get an equal
            part of `gpus_per_process` and all of `cpus_per_process`.
        guests: maximum number of further processes on each place, which share GPUs; see the method `guests`.
        name: name for messages.
        timeout: seconds to wait for the resources.

    Raises:
        ControllerError: the numbers are impossible.
    """

    def __init__(
        self,
        processes_per_node: Sequence[int] = (1,),
        *,
        gpus_per_process: float = 0,
        cpus_per_process: float = 1,
        max_colocate: int = 1,
        guests: int = 0,
        name: str | None = None,
        timeout: float = 60.0,
    ):
        _check_numbers(processes_per_node, gpus_per_process, cpus_per_process, max_colocate)
        name = name or f"pool{next(_numbers)}"
        own = PlacementGroups(name, processes_per_node, cpus_per_process, gpus_per_process, max_colocate, guests)
        self._set(_nodes_of(own), name, timeout, gpus_per_process, cpus_per_process, max_colocate, own)

    def _set(
        self,
        nodes: Sequence[Sequence[Bundle]],
        name: str,
        timeout: float,
        gpus_per_process: float,
        cpus_per_process: float,
        max_colocate: int,
        own: PlacementGroups | None,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.gpus_per_process = gpus_per_process
        self.cpus_per_process = cpus_per_process
        self.max_colocate = max_colocate
        self._nodes = [list(node) for node in nodes]
        self._own = own
        self._guest_of: tuple[PlacementGroups, Sequence[int]] | None = None

    def _view(self, nodes: Sequence[Sequence[Bundle]], name: str) -> ResourcePool:
        """Make a pool over bundles that other pools reserve."""
        pool = ResourcePool.__new__(ResourcePool)
        pool._set(nodes, name, self.timeout, self.gpus_per_process, self.cpus_per_process, self.max_colocate, own=None)
        return pool

    @property
    def processes_per_node(self) -> tuple[int, ...]:
        """Number of processes of each entry, which are on one node."""
        return tuple(len(node) for node in self._nodes)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.processes_per_node)

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of each process's place, for all groups on the pool together, by Ray's names."""
        return dict(self._nodes[0][0][0].bundle) if self._nodes else {}

    @property
    def groups(self) -> list[str]:
        """Names of the worker groups that lease a place of the pool."""
        return list(dict.fromkeys(name for placed, index in self._bundles for name in placed.tenants(index)))

    @property
    def _bundles(self) -> list[Bundle]:
        return [bundle for node in self._nodes for bundle in node]

    def split(self, parts: int | Sequence[int]) -> list[ResourcePool]:
        """Make pools over consecutive parts of this pool's processes.

        The parts use the places of this pool. So a group on a part takes places of this pool too, and counts towards
        the `max_colocate` of these places.

        Args:
            parts: number of equal parts, or the size of each part in processes.

        Raises:
            ControllerError: the parts would not be equal, or their sizes do not add up to the size of the pool.
        """
        size = self.world_size
        if isinstance(parts, int):
            if parts < 1 or size % parts:
                raise ControllerError(
                    f"pool {self.name!r} of {size} processes cannot be split into {parts} equal parts; give the size "
                    "of each part as a list"
                )
            sizes = [size // parts] * parts
        else:
            sizes = list(parts)
            if sum(sizes) != size or min(sizes, default=0) < 1:
                raise ControllerError(
                    f"pool {self.name!r} of {size} processes cannot be split into parts of {sizes}; give positive "
                    f"sizes that add up to {size}"
                )
        ends = list(itertools.accumulate(sizes))
        return [
            self._view(_cut(self._nodes, end - count, end), f"{self.name}[{end - count}:{end}]")
            for count, end in zip(sizes, ends)
        ]

    def guests(self, each: int, number: int) -> list[ResourcePool]:
        """Make pools of one process each, which takes turns with `each` neighbouring processes on their GPUs.

        Ray assigns no GPUs to a guest. Launch the groups on this pool first.

        Args:
            each: number of this pool's processes, on one node, per guest.
            number: number of guests.

        Raises:
            ControllerError: the pool has too few processes on one node for the guests.
        """
        blocks = [node[at : at + each] for node in self._nodes for at in range(0, len(node) - each + 1, each)]
        if len(blocks) < number or self._own is None:
            raise ControllerError(
                f"pool {self.name!r} has processes_per_node={list(self.processes_per_node)}: not enough for {number} "
                f"guests that each use the GPUs of {each} processes on one node"
            )
        pools = []
        for place, block in enumerate(blocks[:number]):
            pool = self._view([[block[0]]], f"{self.name}, guest {place}")
            pool.gpus_per_process = self.gpus_per_process * each
            pool._guest_of = self._own, [index for _, index in block]
            pools.append(pool)
        return pools

    def lease(self, group: str) -> Lease:
        """Lease a place for each process of a worker group. The first lease reserves the pool.

        Raises:
            PlacementError: `max_colocate` groups are on the pool already, or the cluster does not provide the resources
                within the pool's timeout.
            ControllerError: the pool was shut down.
        """
        if not self._nodes:
            raise ControllerError(f"pool {self.name!r} was shut down; create a new pool for {group!r}")
        lease = Lease(self, group, self._bundles, self._guest_of)
        lease.begin()
        return lease

    def shutdown(self) -> None:
        """Free all resources. Shut down the groups on the pool first, because they lose their processes. A restart of
        such a group reserves the pool again. A merged or split pool only drops its places."""
        if self._own is None:
            self._nodes = []
        else:
            self._own.give_back()

    def __repr__(self) -> str:
        return f"ResourcePool({self.name!r}, processes_per_node={list(self.processes_per_node)}, {self.bundle} each)"


def merge_resource_pools(*pools: ResourcePool) -> ResourcePool:
    """Make a pool over the places of several pools, with the ranks of the first pool, then of the second, and so on.

    The merged pool reserves nothing itself, because it uses the places of the pools. So a group on the merged pool
    counts towards the `max_colocate` of each pool, and a group on a pool counts towards that of the merged pool. To
    place groups on two pools and on their merged pool at once, make the two pools with `max_colocate=2`.

    Raises:
        ControllerError: there are no pools, they overlap, or their processes do not get the same resources.
    """
    if not pools or not all(isinstance(pool, ResourcePool) for pool in pools):
        raise ControllerError(
            "merge_resource_pools needs one pool per argument: merge_resource_pools(a, b), or for a list "
            "merge_resource_pools(*pools). It was given "
            + (", ".join(type(pool).__name__ for pool in pools) or "no arguments")
        )
    first, *remaining = pools
    for pool in remaining:
        for attribute in ("gpus_per_process", "cpus_per_process", "max_colocate"):
            if getattr(first, attribute) != getattr(pool, attribute):
                raise ControllerError(
                    f"pools {first.name!r} and {pool.name!r} cannot be merged: {attribute} is "
                    f"{getattr(first, attribute)} and {getattr(pool, attribute)}; both values must be equal"
                )
    bundles = [bundle for pool in pools for bundle in pool._bundles]
    if len(set(bundles)) < len(bundles):
        raise ControllerError(
            f"pools {', '.join(repr(pool.name) for pool in pools)} cannot be merged: some of their places are the same"
        )
    merged = first._view([node for pool in pools for node in pool._nodes], "+".join(pool.name for pool in pools))
    merged.timeout = max(pool.timeout for pool in pools)
    return merged


def _nodes_of(own: PlacementGroups) -> list[list[Bundle]]:
    numbers = iter(range(len(own)))
    return [[(own, next(numbers)) for _ in range(count)] for count in own.processes_per_node]


def _cut(nodes: Sequence[Sequence[Bundle]], start: int, end: int) -> list[list[Bundle]]:
    parts = []
    offset = 0
    for node in nodes:
        part = list(node[max(start - offset, 0) : max(end - offset, 0)])
        if part:
            parts.append(part)
        offset += len(node)
    return parts


def _check_numbers(
    processes_per_node: Sequence[int], gpus_per_process: float, cpus_per_process: float, max_colocate: int
) -> None:
    counts = processes_per_node if isinstance(processes_per_node, Sequence) else ()
    if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        raise ControllerError(
            "processes_per_node must have one positive number per node, such as [4] or [4, 2], not "
            f"{processes_per_node!r}"
        )
    if max_colocate < 1 or gpus_per_process < 0 or cpus_per_process < 0 or not (gpus_per_process or cpus_per_process):
        raise ControllerError(
            "a pool needs max_colocate of at least 1 and a positive number of CPUs or GPUs per process, not "
            f"{max_colocate=}, {cpus_per_process=}, {gpus_per_process=}"
        )
    gpus = gpus_per_process
    if gpus > 1 and (gpus % 1 or (max_colocate % gpus and gpus % max_colocate)):
        raise ControllerError(
            f"each process would get {gpus / max_colocate:g} GPUs ({gpus_per_process=}, {max_colocate=}), but Ray "
            "assigns a part of one GPU, or whole GPUs: set gpus_per_process to at most 1, or to a whole number that "
            "divides max_colocate or is a multiple of it"
        )
