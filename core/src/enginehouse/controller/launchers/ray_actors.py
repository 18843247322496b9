"""Starts the Ray actors of a group: one `Host` per rank, with the methods and environment of its roles."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from enginehouse.controller.errors import ControllerError
from enginehouse.controller.launchers.host import VISIBLE, Host, log_level_for_workers
from enginehouse.controller.launchers.interface import Lane, LaunchOptions
from enginehouse.controller.launchers.node_paths import (
    check_nodes,
    model_paths,
    name_missing_model,
    name_missing_start,
    needed_paths,
)
from enginehouse.controller.placement_group import Slot, find_nodes
from enginehouse.controller.registration import is_async, registered_methods
from enginehouse.controller.worker import WorkerSpec
from enginehouse.runtimes.probe import check_interpreter

ASYNC_CALLS = 32
"""Maximum number of async calls that a process runs at once; further calls wait."""
URGENT_CALLS = 8
"""Maximum number of urgent calls that a process runs at once, in addition."""


def start_actors(slots: Sequence[Slot], roles: Mapping[str, WorkerSpec], options: LaunchOptions) -> Iterator[Any]:
    """Start an actor on each slot, without waiting, and yield each actor. Raises `ControllerError` if colocated roles
    contradict each other, or a node lacks files that its workers need."""
    host = _host_class(roles, options.name)
    python = next(iter(roles.values())).python
    if python is not None:
        paths = needed_paths(python, _merge_variables(roles, "env", options.name))
        check_nodes(options.name, find_nodes(slots), paths, name_missing_start)
    if models := model_paths(path for role in roles.values() for path in role.reads):
        check_nodes(options.name, find_nodes(slots), models, name_missing_model)
    for rank in range(len(slots)):
        yield _make_actor(host, rank, slots, roles, options)


def open_lanes(actors: Sequence[Any], splitting: bool = False) -> dict[Lane, list[Any]]:
    """Make the handles that send calls, for each lane and rank. They are made only once, because `options` of Ray takes
    as long as a call.

    Args:
        splitting: True if results come back in two objects, as `keep_back` splits them.
    """
    returns: dict[str, Any] = {"num_returns": 2} if splitting else {}
    groups: dict[Lane, dict[str, str]] = {
        "main": {},
        "loop": {"concurrency_group": "loop"},
        "urgent": {"concurrency_group": "urgent"},
    }
    return {
        lane: [actor.call.options(**returns, **group) if returns or group else actor.call for actor in actors]
        for lane, group in groups.items()
    }


def open_direct(actors: Sequence[Any], roles: Mapping[str, WorkerSpec]) -> dict[tuple[str, str], list[Any]]:
    """Return the handles that send calls without arguments, by role and method, for each rank."""
    return {
        (role, method): [getattr(actor, _direct_name(role, method)) for actor in actors]
        for role, spec in roles.items()
        for method in registered_methods(spec.cls)
    }


def _make_actor(
    host: Any, rank: int, slots: Sequence[Slot], roles: Mapping[str, WorkerSpec], options: LaunchOptions
) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from enginehouse.plugin import plugins

    slot = slots[rank]
    variables = _merge_variables(roles, "variables", options.name)
    variables |= {"OMP_NUM_THREADS": str(options.threads), **plugins().environment()}
    if not slot.gpus:  # Ray (2.60) would let it see all GPUs of the node
        variables[VISIBLE] = ",".join(slot.devices or ())
    strategy = PlacementGroupSchedulingStrategy(slot.placement_group, placement_group_bundle_index=slot.bundle)
    placed = host.options(num_cpus=slot.cpus, num_gpus=slot.gpus, scheduling_strategy=strategy)
    return placed.remote(options.name, rank, len(slots), variables, log_level_for_workers())


def _host_class(roles: Mapping[str, WorkerSpec], group: str) -> Any:
    """Make the actor class: `Host` with Ray's lanes, and a direct method for each registered method. The direct methods
    take no argument, because any argument makes an empty call an eighth slower."""
    import ray

    for name in ("facts", "ping", "stacks", "idle_seconds"):
        ray.method(concurrency_group="control")(getattr(Host, name))

    def direct(role: str, method: str, on_loop: bool) -> Any:
        head: tuple[Any, ...] = (role, method, "whole", (), {})

        def call(self: Any) -> Any:
            return self.call(head)

        return ray.method(concurrency_group="loop")(call) if on_loop else call

    methods = {
        _direct_name(role, method): direct(role, method, is_async(spec.cls, method))
        for role, spec in roles.items()
        for method in registered_methods(spec.cls)
    }
    return ray.remote(  # type: ignore[call-overload]
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups={"loop": ASYNC_CALLS, "urgent": URGENT_CALLS, "control": 1},
        **_runtime_env(roles, group),
    )(type(Host.__name__, (Host,), methods))


def _direct_name(role: str, method: str) -> str:
    return f"{role}.{method}"


def _runtime_env(roles: Mapping[str, WorkerSpec], group: str) -> dict[str, Any]:
    """Collect the settings that must hold before the interpreter starts. If there are any, Ray starts new processes
    instead of using idle ones."""
    env, pythons = _merge_variables(roles, "env", group), {spec.python for spec in roles.values()}
    if len(pythons) > 1:
        named = sorted(python or "the driver's own" for python in pythons)
        raise ControllerError(f"{group}: colocated roles cannot use different interpreters: {named}")
    runtime_env: dict[str, Any] = {"env_vars": env} if env else {}
    if (python := pythons.pop()) is not None:
        if os.path.exists(python):  # a path that only other nodes have is checked at the worker's start
            check_interpreter(python)
        runtime_env["py_executable"] = python
    return {"runtime_env": runtime_env} if runtime_env else {}


def _merge_variables(roles: Mapping[str, WorkerSpec], which: Literal["env", "variables"], group: str) -> dict[str, str]:
    """Merge the environment variables in the attribute `which` of the roles' specs."""
    merged: dict[str, str] = {}
    for role, spec in roles.items():
        for name, value in getattr(spec, which).items():
            if merged.setdefault(name, value) != value:
                raise ControllerError(
                    f"{group}: colocated roles cannot set different values of the environment variable {name} (as role "
                    f"{role!r} does)"
                )
    return merged
