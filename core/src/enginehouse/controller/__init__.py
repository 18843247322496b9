"""The single controller: resource pools, worker groups, and the dispatch of calls to ranks.

The controller is one Python program that drives all workers and reads like a program of one process. Each role runs as
SPMD: all its ranks execute the same method.

    with start_ray(), WorkerGroup(ResourcePool([2]), WorkerSpec(Actor, lr=1e-5), name="actor") as actor:
        actor.update(batch)

Importing this package imports neither ray nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse.lazy import exports

if TYPE_CHECKING:
    from enginehouse.controller.cluster import Cluster, start_ray, stop_ray
    from enginehouse.controller.colocation import colocate
    from enginehouse.controller.dispatch import Balanced, PerRank, Same
    from enginehouse.controller.distributed import DistributedBatch
    from enginehouse.controller.errors import (
        ControllerError,
        DataLost,
        DispatchError,
        GroupClosed,
        PlacementError,
        RemoteError,
        WorkerDied,
        WorkerError,
        WorkerTimeout,
        unwrap_user_error,
    )  # fmt: skip
    from enginehouse.controller.future import Future, StillRunning
    from enginehouse.controller.group import WorkerGroup
    from enginehouse.controller.layout import DataLayout
    from enginehouse.controller.pool import ResourcePool, merge_resource_pools
    from enginehouse.controller.registration import Dispatch, Execute, register
    from enginehouse.controller.tracing import add_listener
    from enginehouse.controller.worker import Worker, WorkerSpec

__all__ = [
    "Balanced",
    "Cluster",
    "ControllerError",
    "DataLayout",
    "DataLost",
    "Dispatch",
    "DispatchError",
    "DistributedBatch",
    "Execute",
    "Future",
    "GroupClosed",
    "PerRank",
    "PlacementError",
    "RemoteError",
    "ResourcePool",
    "Same",
    "StillRunning",
    "Worker",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerTimeout",
    "add_listener",
    "colocate",
    "merge_resource_pools",
    "register",
    "start_ray",
    "stop_ray",
    "unwrap_user_error",
]

__getattr__ = exports(
    __name__,
    {
        "cluster": ["Cluster", "start_ray", "stop_ray"],
        "colocation": ["colocate"],
        "dispatch": ["Balanced", "PerRank", "Same"],
        "distributed": ["DistributedBatch"],
        "errors": [
            "ControllerError",
            "DataLost",
            "DispatchError",
            "GroupClosed",
            "PlacementError",
            "RemoteError",
            "WorkerDied",
            "WorkerError",
            "WorkerTimeout",
            "unwrap_user_error",
        ],
        "future": ["Future", "StillRunning"],
        "group": ["WorkerGroup"],
        "layout": ["DataLayout"],
        "pool": ["ResourcePool", "merge_resource_pools"],
        "registration": ["Dispatch", "Execute", "register"],
        "tracing": ["add_listener"],
        "worker": ["Worker", "WorkerSpec"],
    },
)
