"""The floor of the dispatch benchmark: Ray actors that are called directly, with numpy arrays as data."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray

from benchmarks.dispatch_columns import check_same, columns
from benchmarks.dispatch_side import WAKING_CALLS, serve
from enginehouse.controller import start_ray


@ray.remote(num_cpus=1)
class Actor:
    """A worker on this side."""

    def noop(self) -> None:
        return None

    def echo(self, part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return part


@ray.remote(num_cpus=1)
class TorchActor:
    """An actor that needs torch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def first(self) -> int:
        return self.torch.ones(1).numel()


class BareRay:
    """The commands of this side; see `benchmarks.dispatch`."""

    def __init__(self) -> None:
        self.ray = start_ray()
        self.actors: list[Any] = []
        self.data: dict[str, np.ndarray] = {}

    def cluster(self) -> dict[str, int]:
        """Return the arguments with which Ray was started, for a side that must start Ray with the same arguments."""
        resources = ray.cluster_resources()
        return {"cpus": int(resources["CPU"]), "object-store-bytes": int(resources["object_store_memory"])}

    def start_group(self, workers: int) -> None:
        self.actors = [Actor.remote() for _ in range(workers)]
        ray.get([actor.noop.remote() for actor in self.actors])

    def stop_group(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def noop(self, calls: int) -> list[float]:
        """Return the seconds of each of `calls` calls of an empty method on every actor."""
        actors = self.actors
        seconds = []
        for _ in range(calls):
            begun = time.perf_counter()
            ray.get([actor.noop.remote() for actor in actors])
            seconds.append(time.perf_counter() - begun)
        return seconds

    def load(self, megabytes: float) -> None:
        """Hold `megabytes` million bytes of data; 0 releases them."""
        self.data = columns(megabytes) if megabytes else {}

    def roundtrip(self) -> float:
        """Return the seconds from data in this process to the same data in new arrays of this process."""
        self.noop(WAKING_CALLS)
        begun = time.perf_counter()
        parts = {name: np.array_split(array, len(self.actors)) for name, array in self.data.items()}
        refs = [
            actor.echo.remote({name: parts[name][rank] for name in parts}) for rank, actor in enumerate(self.actors)
        ]
        received = ray.get(refs)
        joined = {name: np.concatenate([part[name] for part in received]) for name in parts}
        seconds = time.perf_counter() - begun
        check_same(self.data, joined)
        return seconds

    def roundtrip_in_store(self) -> float:
        """Return the seconds of the same round trip if the result is read in the object store and not copied."""
        self.noop(WAKING_CALLS)
        begun = time.perf_counter()
        parts = {name: np.array_split(array, len(self.actors)) for name, array in self.data.items()}
        ray.get(
            [actor.echo.remote({name: parts[name][rank] for name in parts}) for rank, actor in enumerate(self.actors)]
        )
        return time.perf_counter() - begun

    def startup(self, workers: int) -> float:
        """Return the seconds until actors that import torch have answered their first call."""
        begun = time.perf_counter()
        actors = [TorchActor.remote() for _ in range(workers)]
        ray.get([actor.first.remote() for actor in actors])
        seconds = time.perf_counter() - begun
        for actor in actors:
            ray.kill(actor)
        return seconds

    def close(self) -> None:
        self.ray.shutdown()


if __name__ == "__main__":
    serve(BareRay())
