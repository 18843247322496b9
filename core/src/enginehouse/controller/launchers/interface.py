"""What a worker group needs of its processes, whoever launched them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from enginehouse.controller.dispatch import Call
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import Device

Lane = Literal["main", "loop", "urgent"]
"""Where a call runs: sync methods on the one main thread, async methods on the event loop, where urgent ones do not
wait for their turn behind the others."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One process of a group.

    Attributes:
        rank: its rank.
        local_rank: its number among the group's processes on its node.
        local_world_size: how many those are.
        node: address of the node.
        pid: process id there.
        log_files: its log files there, errors first.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node: str
    pid: int
    log_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How processes are launched.

    Attributes:
        name: the group's name, for messages.
        start_timeout: seconds until every worker must be built.
        seed: `ProcessContext.seed`.
        device: `ProcessContext.device`.
        threads: threads of numeric libraries in each process.
        timeout: seconds until a call must have ended that says nothing else.
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
        deadline: when it must have ended, by `time.monotonic`; it may be put off (`overdue`).
    """

    deadline: float

    def wait(self, limit: float | None = None) -> list[Any]:
        """Outputs, one a rank (None for ranks that were not called or whose results are not collected).

        Raises:
            StillRunning: `limit` seconds passed, and the call's deadline has not: it goes on.
            WorkerError: the call failed, or its deadline passed.
        """
        ...

    def done(self) -> bool:
        """Whether every rank has ended, or the call is overdue."""
        ...

    def overdue(self) -> bool:
        """Whether the deadline has passed. Of a patient call it is put off, instead, where a rank has got on with its
        work meanwhile: once it has passed, that is asked for, which may take seconds.
        """
        ...

    def add_done_callback(self, callback: Callable[[bool], object]) -> None:
        """Call back once: when every rank has ended, or one has failed; at once if that is so. From any thread.

        `callback` is told whether all ended well.
        """
        ...

    def look(self) -> None:
        """See that what is to answer is still there.

        Raises:
            ClusterLost: Ray is about to end.
        """
        ...

    def hurry(self) -> None:
        """Who waited was interrupted: the processes may not get to an orderly end in the usual time."""
        ...

    def reference(self, rank: int) -> Any:
        """Something that stands for one rank's output in the arguments of another call, or None if there is none."""
        ...


class WorkerProcesses(Protocol):
    """The processes of a group, each holding one object for every role."""

    @property
    def places(self) -> Sequence[WorkerPlace]:
        """Where each rank is."""
        ...

    @property
    def roles(self) -> Mapping[str, WorkerSpec]:
        """What lives in each process."""
        ...

    @property
    def options(self) -> LaunchOptions:
        """How they were launched."""
        ...

    @property
    def broken(self) -> str | None:
        """Why no further call is possible; None while calls are."""
        ...

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
        """Send a call; results of the ranks in `keep` come back, with `keeps_back` a `Shard` in a batch's place.

        The time limit of a `patient` one counts from when a rank last got on (`enginehouse.engines.progress`).
        """
        ...

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        """Each rank's mesh: as it was after `__init__` or at the last refresh."""
        ...

    def shutdown(self, timeout: float) -> None:
        """End the processes: workers' `shutdown` first, then the processes, all within about `timeout` seconds."""
        ...

    def restarted(self) -> WorkerProcesses:
        """End the processes and start others with the same ranks, roles and options, which are returned.

        Calls that had not ended fail. Where the start fails, these stay, broken, and may be restarted again.

        Raises:
            GroupClosed: they were shut down.
            PlacementError: a place was lost with its node, and the cluster does not give another in time.
            WorkerError: a worker could not be built.
        """
        ...
