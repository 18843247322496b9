"""Places where acts run: ranks of a training engine, a replica of a rollout engine, or this process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
from enginehouse.controller.errors import WorkerDied
from enginehouse.plugin import Layout, RolloutBackend, resolve
from enginehouse_rl.plan.device import visible_gpus
from enginehouse_testing.check import Check, Seen
from enginehouse_testing.problem import CRITICS, EDGE, EXPERTS, MODELS, model_path
from enginehouse_testing.prompts import ROLLOUT_MODELS, rollout_model
from enginehouse_testing.rank import EngineUnderTest
from enginehouse_testing.replica import ReplicaUnderTest

if TYPE_CHECKING:
    from enginehouse.controller import Cluster
    from enginehouse.engines.model import Device
    from enginehouse_rewards.pool import RewardPool
    from enginehouse_testing.given import Given

log = logging.getLogger(__name__)

ACT_SECONDS = 180.0
"""Maximum time of a training engine's act, about forty times what an act takes on two quiet cores."""
ROLLOUT_ACT_SECONDS = 600.0
"""Maximum time of a rollout engine's act, launch included."""
TRANSPORT_SECONDS = 60.0
"""Deadline of all operations of a transport, including operations that have to fail at once."""
FUNCTION_SECONDS = 60.0
"""Maximum time of an act of a function."""
END_SECONDS = 60.0
"""Maximum time in which an engine may end; then its process is killed."""

TRIALS = {
    "loss": "enginehouse_testing.loss_trial:LossTrial",
    "advantage": "enginehouse_testing.advantage_trial:AdvantageTrial",
    "tracker": "enginehouse_testing.tracker_trial:TrackerTrial",
    "environment": "enginehouse_testing.environment_trial:EnvironmentTrial",
}
"""The class of the trial that an act gets, by kind of record."""


def gpus_of(record: RolloutBackend, layout: Layout) -> int:
    """Return the number of GPUs of one replica."""
    return int(resolve(record.options)(**layout.options).gpus())


def _start(
    pool: ResourcePool, spec: WorkerSpec, name: str, device: Any, seconds: float
) -> tuple[WorkerGroup, ResourcePool]:
    """Start workers in a pool. Shut the pool down if they do not start."""
    try:
        return WorkerGroup(pool, spec, name=name, device=device, timeout=seconds), pool
    except BaseException:
        pool.shutdown()
        raise


class Site:
    """A place where the acts of all checks of one kind of record run."""

    def open(self) -> None:
        """Start what all acts need."""

    def close(self) -> None:
        """End all processes."""

    def act(self, record: Any, check: Any, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run act `number` of a check, and raise the errors of the act."""
        raise NotImplementedError

    def discard(self, layout: Layout) -> None:
        """End or forget the engine or the processes in which a check failed."""

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Return versions of distributions in the engine's own Python environment; empty if it has none."""
        return {}


class TrainSite(Site):
    """Worker groups of training engines. There is a group for each number of processes, with one rank in each process.

    Args:
        seconds: maximum time of an act.
        device: device of the engines, except in checks for GPUs only.
    """

    def __init__(self, seconds: float, device: Device = "cpu") -> None:
        self._seconds = seconds
        self._device = device
        self._groups: dict[tuple[int, str], tuple[WorkerGroup, ResourcePool]] = {}
        self._cluster: Cluster | None = None
        self._models = {name: model_path(name) for name in (*MODELS, *CRITICS, *EXPERTS, *EDGE)}

    def open(self) -> None:
        """Start Ray."""
        self._cluster = start_ray()

    def close(self) -> None:
        """End all groups."""
        for key in list(self._groups):
            self._end(key)
        if self._cluster is not None:
            self._cluster.shutdown()

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run an act on all ranks."""
        key = (layout.processes, "cuda" if check.device == "cuda" else self._device)
        try:
            if key not in self._groups:
                if key[1] == "cuda":
                    self._make_room(layout.processes)
                gpus, name = int(key[1] == "cuda"), f"{record.name}-{layout.processes}"
                pool = ResourcePool([layout.processes], gpus_per_process=gpus, name=f"{layout.processes}-{key[1]}")
                self._groups[key] = _start(pool, WorkerSpec(EngineUnderTest), name, key[1], self._seconds)
            group, _ = self._groups[key]
            seen: list[Seen] = group.call("act", record, check, number, layout, self._models, directory)
            return seen
        except Exception:
            self._end(key, timeout=0.1)  # ranks that did not fail wait for the ranks that did
            raise

    def _make_room(self, gpus: int) -> None:
        """End groups that hold GPUs if the free GPUs do not suffice."""
        holding = [key for key in self._groups if key[1] == "cuda"]
        if sum(processes for processes, _ in holding) + gpus > visible_gpus():
            for key in holding:
                self._end(key, timeout=0.1)

    def _end(self, key: tuple[int, str], **how: float) -> None:
        if key in self._groups:
            group, pool = self._groups.pop(key)
            group.shutdown(**how)
            pool.shutdown()


class RolloutSite(Site):
    """One process with one replica in it, under the interpreter of the backend's runtime.

    Args:
        python: path of the interpreter; None: this process's own.
        env: environment variables of the process.
        device: device of the engine.
        seconds: maximum time of an act, launch included.
    """

    def __init__(self, python: str | None, env: Mapping[str, str], device: Device, seconds: float):
        self._seconds = seconds
        self._spec = WorkerSpec(ReplicaUnderTest).options(python=python, env=dict(env) or None, distributed=False)
        self._device: Device = device
        self._group: tuple[WorkerGroup, ResourcePool] | None = None
        self._layout: Layout | None = None
        self._launched: tuple[str, str, str | None] | None = None  # engine, layout and model that are launched
        self._cluster: Cluster | None = None
        self._models = {name: rollout_model(name) for name in ROLLOUT_MODELS}

    def open(self) -> None:
        """Start Ray."""
        self._cluster = start_ray()

    def close(self) -> None:
        """End the process."""
        self._end()
        if self._cluster is not None:
            self._cluster.shutdown()

    def act(self, record: Any, check: Any, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run an act on the replica. If the replica does not run yet, launch it first."""
        wanted = (record.engine, layout.name, check.model)
        if self._launched not in (None, wanted):
            self.discard(layout)
        if self._layout != layout or check.fresh:
            self._end()  # each layout has its own GPUs
        self._launched = wanted
        try:
            group = self._running_group(record, layout)
            seen: list[Seen] = group.call("act", record, check, layout, self._models, directory)
        except WorkerDied as error:
            self._end()
            if not check.ends:
                raise
            return [Seen(0, 1, True, error)]
        if check.ends:
            self._end()
        elif check.breaks:
            self.discard(layout)
        return seen

    def discard(self, layout: Layout) -> None:
        """End the engine, and its process too unless the process can launch another engine."""
        self._launched = None
        if self._group is None:
            return
        group, _ = self._group
        try:
            if group.call("forget", timeout=END_SECONDS) == [True]:
                return
        except Exception as error:
            log.info("%s could not be ended: %s", group.name, error)
        self._end()

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Return the versions of distributions in the runtime; empty if the process has not been started yet."""
        if self._group is None:
            return {}
        versions: dict[str, str] = self._group[0].call("versions", list(names))[0]
        return versions

    def _running_group(self, record: RolloutBackend, layout: Layout) -> WorkerGroup:
        if self._group is None:
            gpus = gpus_of(record, layout) if self._device == "cuda" else 0
            pool = ResourcePool([1], gpus_per_process=gpus, name=f"rollout-{self._device}")
            self._group = _start(pool, self._spec, f"{record.name}-rollout", self._device, self._seconds)
            self._layout = layout
        return self._group[0]

    def _end(self) -> None:
        running, self._group, self._launched = self._group, None, None
        if running is not None:
            group, pool = running
            group.shutdown(timeout=END_SECONDS)
            pool.shutdown()


class TransportSite(Site):
    """This process, with senders and receivers of a transport on threads.

    Args:
        seconds: deadline of operations that have to succeed, or to fail at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run act `number` of a check. The act gets a `Link`, with which it connects senders and receivers."""
        from enginehouse_testing.link import Link

        return [Seen(0, 1, True, check.acts[number](Link(record, layout.processes, self._seconds)))]


class HereSite(Site):
    """This process. Each act gets a trial of a function or a class, and runs on a thread with a deadline.

    Args:
        given: arguments and data of the trial.
        seconds: maximum time of an act.
    """

    def __init__(self, given: Given, seconds: float) -> None:
        self._given, self._seconds = given, seconds

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run an act. A thread that does not end is left behind."""
        trial = self._trial(record, directory)
        ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((check.acts[number](trial), None))
            except BaseException as error:  # any error is the check's result
                ended.put((None, error))

        threading.Thread(target=run, name=f"{record.name}-{check.name}", daemon=True).start()
        try:
            value, error = ended.get(timeout=self._seconds)
        except queue.Empty:
            raise TimeoutError(f"it took more than {self._seconds:g} s") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}")
        return [Seen(0, 1, True, value)]

    def _trial(self, record: Any, directory: str) -> Any:
        """Return the trial that an act gets."""
        return resolve(TRIALS[record.kind])(record, self._given, Path(directory))


class RewardSite(HereSite):
    """A `HereSite` with processes of reward pools. The acts share these processes until an act fails."""

    _pools: tuple[RewardPool, ...] = ()

    def close(self) -> None:
        """End the processes."""
        pools, self._pools = self._pools, ()
        for pool in pools:
            pool.close()

    def discard(self, layout: Layout) -> None:
        """End the processes, because the failed act may have left a process that hangs."""
        self.close()

    def _trial(self, record: Any, directory: str) -> Any:
        from enginehouse_testing.reward_trial import RewardTrial, pool_of

        if not self._pools:
            watched = {"watched": record.function, "watched_arguments": dict(self._given.arguments)}
            self._pools = (
                pool_of(record.function, self._given.arguments, self._given.seconds),
                pool_of("enginehouse_testing.watched:printed_bytes", watched, self._seconds),  # with its import
            )
        return RewardTrial(record, self._given, Path(directory), *self._pools)
