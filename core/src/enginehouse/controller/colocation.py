"""Worker groups of several roles in the same processes."""

from __future__ import annotations

from collections.abc import Mapping

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.group import WorkerGroup, launch, reserve_names
from enginehouse.controller.launchers.interface import LaunchOptions
from enginehouse.controller.pool import ResourcePool
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.model import Device


def colocate(
    pool: ResourcePool | None,
    specs: Mapping[str, WorkerSpec],
    *,
    name: str | None = None,
    launcher: str = "ray",
    timeout: float = 600.0,
    start_timeout: float = 300.0,
    seed: int = 0,
    device: Device = "cpu",
    threads: int = 1,
) -> dict[str, WorkerGroup]:
    """Launch one process per rank, which holds an object of each role, and return a group for each role.

    The roles of a process share one event loop and one main thread, in which their sync methods run one after the other
    in call order. A process builds its objects in the order of `specs`. All ranks share one rendezvous. The processes
    end with the shutdown of the last group. If a process dies, all groups are broken.

    Args:
        pool: pool of the processes; the inline launcher needs none.
        specs: a spec for each role. The role is the name of its group.
        name: name of the processes in messages about all roles; by default the roles' names joined with `+`.
        launcher: `"ray"` or `"inline"`.
        timeout: deadline of a call in seconds.
        start_timeout: seconds within which every object must be built.
        seed: base seed of the run.
        device: `"cpu"` or `"cuda"`.
        threads: number of threads that numeric libraries use in each process.

    Raises:
        ControllerError: `specs` is empty, process options of the roles contradict each other, or the pool is not
            available.
        WorkerError: an object could not be built.
    """
    if not specs:
        raise ControllerError("colocate needs at least one role")
    for spec in specs.values():
        reserve_names(spec)
    options = LaunchOptions(name or "+".join(specs), start_timeout, seed, device, threads, timeout)
    processes = launch(launcher, pool, specs, options)
    owners: list[WorkerGroup] = []
    return {role: WorkerGroup.view(processes, role, timeout, owners) for role in specs}
