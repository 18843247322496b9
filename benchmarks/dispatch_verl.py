"""The dispatch benchmark with verl's single controller: `RayWorkerGroup` and `DataProto`. Runs in verl's environment.

It imports nothing of enginehouse. verl is installed without its dependencies, except those that its single controller
imports, in the versions that verl asks for; see `VERL` in `benchmarks.dispatch`.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks.dispatch_columns import check_same, columns
from benchmarks.dispatch_side import WAKING_CALLS, serve

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"


@ray.remote
class Echo(Worker):
    """A worker on this side."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def noop(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialize_by(self, method: str) -> None:
        os.environ[SERIALIZATION] = method

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data


class Verl:
    """The commands of this side; see `benchmarks.dispatch`."""

    def __init__(self, cpus: int, object_store_bytes: int):
        ray.init(
            address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=object_store_bytes,
            log_to_driver=False, logging_level=logging.ERROR,
        )  # fmt: skip
        self.spec: Any = None
        self.whole: Any = None
        self.group: Any = None
        self.data: Any = None

    def start_group(self, workers: int) -> None:
        """Use `workers` workers: the first of those that exist, or a new group of that size."""
        if self.whole is None or workers > self.whole.world_size:
            self.stop_group()
            pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
            self.spec = RayClassWithInitArgs(Echo)
            self.whole = RayWorkerGroup(pool, self.spec, device_name="cpu")
        handles = self.whole.workers[:workers]
        self.group = RayWorkerGroup.from_detached(worker_handles=handles, ray_cls_with_init=self.spec)
        self.group.noop()

    def keep_workers(self, workers: int) -> None:
        """End all workers except the first ones."""
        for worker in self.whole.workers[workers:]:
            ray.kill(worker)

    def stop_group(self) -> None:
        if self.whole is not None:
            self.keep_workers(0)
            self.whole = self.group = None

    def noop(self, calls: int) -> list[float]:
        """Return the seconds of each of `calls` calls of an empty method on every worker."""
        group = self.group
        seconds = []
        for _ in range(calls):
            begun = time.perf_counter()
            group.noop()
            seconds.append(time.perf_counter() - begun)
        return seconds

    def load(self, megabytes: float) -> None:
        """Hold `megabytes` million bytes of data; 0 releases them."""
        self.data = None
        if megabytes:
            made = columns(megabytes)
            self.data = DataProto.from_dict({name: torch.from_numpy(array) for name, array in made.items()})

    def roundtrip(self, serialization: str = "") -> float:
        """Return the seconds from a `DataProto` of this process to the same data in a new one.

        Args:
            serialization: value of verl's `VERL_DATAPROTO_SERIALIZATION_METHOD`; empty: verl's default.
        """
        if os.environ.get(SERIALIZATION, "") != serialization:
            os.environ[SERIALIZATION] = serialization
            self.group.serialize_by(serialization)
        self.noop(WAKING_CALLS)
        begun = time.perf_counter()
        received = self.group.echo(self.data)
        seconds = time.perf_counter() - begun
        check_same(*({name: tensor.numpy() for name, tensor in one.batch.items()} for one in (self.data, received)))
        return seconds

    def close(self) -> None:
        ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--object-store-bytes", type=int, required=True)
    arguments = parser.parse_args()
    serve(Verl(arguments.cpus, arguments.object_store_bytes))
