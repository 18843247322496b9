"""The contract between a worker group and its processes, whoever launched them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from enginehouse.controller.dispatch import Call
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import Device

Lane = Literal["main", "loop", "urgent"]
"""Thread that a call runs on: sync methods run on the main thread, async methods on the event loop. Urgent async
methods do not wait for their turn behind other calls."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of one process of a group.

    Attributes:
        rank: its rank.
        local_rank: its number among the group's processes on its node.
        local_world_size: number of the group's processes on its node.
        node: address of the node.
        pid: process id on the node.
        log_files: its log files on the node, errors first.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node: str
    pid: int
    log_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of a launch.

    Attributes:
        name: the group's name, for messages.
        start_timeout: seconds until every worker must be built.
        seed: `ProcessContext.seed`.
        device: `ProcessContext.device`.
        threads: threads of numeric libraries in each process.
        timeout: default deadline of a call in seconds.
    """

    name: str
    start_timeout: float = 300.0
    seed: int = 0
    device: Device = "cpu"
    threads: int = 1
    timeout: float = 600.0


class PendingCall(Protocol):
    """A call on its way.

    Attributes:
        deadline: latest time of its end, by `time.monotonic`; `overdue` may put it off.
    """

    deadline: float

    def wait(self, limit: float | None = None) -> list[Any]:
        """Return one output a rank; None for ranks that were not called or whose results are not collected.

        Raises:
            StillRunning: `limit` seconds passed, and the call's deadline has not, so the call continues.
            WorkerError: the call failed, or its deadline passed.
        """

    def done(self) -> bool:
        """Return True if every rank has ended, or the call is overdue."""

    def overdue(self) -> bool:
        """Return True if the deadline has passed.

        The deadline of a patient call is put off instead if a rank has made progress since; asking may take seconds.
        """

    def add_done_callback(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` once, from any thread: with True when every rank has ended well, with False when one failed.

        If that is so already, it is called at once.
        """

    def look(self) -> None:
        """Check that the processes that are to answer still exist.

        Raises:
            ClusterLost: Ray is about to end.
        """

    def hurry(self) -> None:
        """Note that the wait was interrupted: the processes may not end in order within the usual time."""

    def reference(self, rank: int) -> Any:
        """Return a stand-in for one rank's output in the arguments of another call, or None if there is none."""


class WorkerProcesses(Protocol):
    """The processes of a group, each holding one object for every role."""

    @property
    def places(self) -> Sequence[WorkerPlace]:
        """The place of each rank."""

    @property
    def roles(self) -> Mapping[str, WorkerSpec]:
        """The worker that each role runs in every process."""

    @property
    def options(self) -> LaunchOptions:
        """The options they were launched with."""

    @property
    def broken(self) -> str | None:
        """The reason why no further call is possible; None while calls are."""

    def submit(
        self,
        role: str,
        method: str,
        calls: Sequence[Call | None],
        keep: frozenset[int],
        lane: Lane,
        timeout: float,
        keeps_back: bool = False,
        patient: bool = False,
    ) -> PendingCall:
        """Send a call.

        Args:
            role: the group's name.
            method: the method's name.
            calls: the arguments of each rank; None for a rank that is not called.
            keep: ranks whose results come back.
            lane: Thread it runs on.
            timeout: deadline in seconds.
            keeps_back: batches stay where they are, and a `Shard` comes back in their place.
            patient: the deadline counts from when a rank last made progress (`enginehouse.engines.progress`).
        """

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        """Return each rank's mesh, as it was after `__init__` or at the last refresh."""

    def shutdown(self, timeout: float) -> None:
        """End the processes within about `timeout` seconds, after the workers' own `shutdown`."""

    def restarted(self) -> WorkerProcesses:
        """End the processes and return new ones with the same ranks, roles and options.

        Calls that had not ended fail. If the start fails, these stay, broken, and may be restarted again.

        Raises:
            GroupClosed: they were shut down.
            PlacementError: a place was lost with its node, and the cluster does not give another in time.
            WorkerError: a worker could not be built.
        """
