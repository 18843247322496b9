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
    """Launch one process a rank, which holds an object for each role, and return a group for each role.

    The roles of a process share one main thread (sync methods of all of them run one after the other, in call
    order) and one event loop. Objects are built in the order of `specs`. One rendezvous serves all. The
    processes end when the last of the groups is shut down; a death breaks all of them.

    Args:
        pool: pool of the processes; the inline launcher needs none.
        specs: a spec for each role; the role is its group's name.
        name: the processes' name, for messages about all of them; by default the roles' names joined.
        launcher: `"ray"` or `"inline"`.
        timeout: deadline of a call in seconds.
        start_timeout: seconds until every object must be built.
        seed: the run's base seed.
        device: `"cpu"` or `"cuda"`.
        threads: threads of numeric libraries in each process.

    Raises:
        ControllerError: there is no role, roles' process options contradict each other, or the pool cannot be had.
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
