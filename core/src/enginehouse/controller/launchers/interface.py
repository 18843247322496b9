"""The interface between a worker group and its processes, which every launcher implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from enginehouse.controller.dispatch import Call
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import Device

Lane = Literal["main", "loop", "urgent"]
"""Lane that a call runs on: the main thread for sync methods, the event loop for async methods. An urgent async method
does not wait for other calls."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of one process of a group.

    Attributes:
        local_rank: number of the process among the group's processes on its node.
        local_world_size: number of the group's processes on the node.
        pid: process id on the node.
        log_files: log files on the node, errors first.
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
        name: name of the group, for messages.
        start_timeout: seconds within which every worker must be built.
        threads: number of threads that numeric libraries use in each process.
        timeout: default deadline of a call in seconds.
    """

    name: str
    start_timeout: float = 300.0
    seed: int = 0
    device: Device = "cpu"
    threads: int = 1
    timeout: float = 600.0


class PendingCall(Protocol):
    """A call that was sent.

    Attributes:
        deadline: time limit of the call, by `time.monotonic`. `overdue` may postpone it.
    """

    deadline: float

    def wait(self, limit: float | None = None) -> list[Any]:
        """Return one output per rank; None for a rank that was not called or whose result is not collected.

        Raises:
            StillRunning: `limit` seconds passed before the call's deadline, so the call continues.
            WorkerError: the call failed, or its deadline passed.
        """

    def done(self) -> bool:
        """Return True if every rank has ended, or the call is overdue."""

    def overdue(self) -> bool:
        """Return True if the deadline has passed. If the call was submitted with `patient` and a rank has made progress
        since, postpone the deadline and return False. The check may take seconds."""

    def add_done_callback(self, callback: Callable[[bool], object]) -> None:
        """Call `callback` once, from any thread, with True when every rank has succeeded or False when a rank has
        failed. If the call has ended already, `callback` is called at once."""

    def look(self) -> None:
        """Check that the called processes still exist. Raises `ClusterLost` if Ray is about to end."""

    def hurry(self) -> None:
        """Record that the wait was interrupted. A shutdown then waits only briefly for workers that are still busy."""

    def reference(self, rank: int) -> Any:
        """Return a placeholder for one rank's output in another call's arguments; None if the launcher has no
        placeholders."""


class WorkerProcesses(Protocol):
    """The processes of a group. Each process holds one object per role."""

    @property
    def places(self) -> Sequence[WorkerPlace]:
        """Place of each rank."""

    @property
    def roles(self) -> Mapping[str, WorkerSpec]:
        """Worker spec of each role, which runs in every process."""

    @property
    def options(self) -> LaunchOptions:
        """Options of the launch."""

    @property
    def broken(self) -> str | None:
        """Reason why no further call is possible; None if the processes are usable."""

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
            calls: arguments of each rank; None for a rank that is not called.
            keep: ranks whose results come back.
            timeout: deadline in seconds.
            keeps_back: True if batches stay on the workers. A `Shard` comes back for each batch.
            patient: True if the time limit is counted from the moment when any rank last made progress
                (`enginehouse.engines.progress`), and not from the moment when the call was sent.
        """

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        """Return the mesh of each rank, as read after the workers' `__init__`, or at the last refresh."""

    def shutdown(self, timeout: float) -> None:
        """Call the workers' own `shutdown`, and end the processes within about `timeout` seconds."""

    def restarted(self) -> WorkerProcesses:
        """End the processes and return new processes with the same ranks, roles and options.

        Running calls fail. If the start fails, these processes are broken, and `restarted` may be called again.

        Raises:
            GroupClosed: the processes were shut down.
            PlacementError: a node has left, and the cluster provides no other place in time.
            WorkerError: a worker could not be built.
        """
