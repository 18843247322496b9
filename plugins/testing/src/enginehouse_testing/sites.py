"""Where acts are run: on the ranks of a training engine, on a rollout engine's replica, or here."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from enginehouse.controller import ResourcePool, WorkerGroup, WorkerSpec, start_ray
from enginehouse.controller.errors import WorkerDied
from enginehouse.plugin import Advantage, Layout, Loss, RolloutBackend, Tracker, resolve
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
    from enginehouse_testing.check import RolloutCheck
    from enginehouse_testing.given import Given

log = logging.getLogger(__name__)

ACT_SECONDS = 180.0
"""Longest an act of a training engine may take: some forty times what one takes on two quiet cores."""
ROLLOUT_ACT_SECONDS = 600.0
"""The same of a rollout engine, its launch included."""
TRANSPORT_SECONDS = 60.0
"""Deadline of all that a transport is to do, and of what is to fail at once."""
FUNCTION_SECONDS = 60.0
"""Longest an act of a function may take."""
END_SECONDS = 60.0
"""Longest an engine may take to end; then its process is killed."""


def gpus_of(record: RolloutBackend, layout: Layout) -> int:
    """GPUs of a replica, on GPUs."""
    return int(resolve(record.options)(**layout.options).gpus())


class Site(Protocol):
    """Where the acts of a kind's checks are run."""

    def open(self) -> None:
        """Be ready."""

    def close(self) -> None:
        """End all processes."""

    def act(self, record: Any, check: Any, number: int, layout: Layout, directory: str) -> list[Seen]:
        """Run act `number` of a check; what goes wrong in it is raised."""
        ...

    def failed(self, layout: Layout) -> None:
        """A check failed: what served its acts is not used again."""

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Versions of distributions where the engine runs, where that may be another Python environment; else empty."""
        ...


class TrainSite:
    """Worker groups of one rank a process, one group for each number of processes.

    Args:
        seconds: longest an act may take.
        device: what engines run on, but in checks that are of GPUs alone.
    """

    def __init__(self, seconds: float, device: Device = "cpu") -> None:
        self._seconds = seconds
        self._device = device
        self._groups: dict[tuple[int, str], WorkerGroup] = {}
        self._pools: dict[tuple[int, str], ResourcePool] = {}
        self._cluster: Cluster | None = None
        self._models = {name: model_path(name) for name in (*MODELS, *CRITICS, *EXPERTS, *EDGE)}

    def open(self) -> None:
        """See `Site`."""
        self._cluster = start_ray()

    def close(self) -> None:
        """See `Site`."""
        for group in self._groups.values():
            group.shutdown()
        for pool in self._pools.values():
            pool.shutdown()
        self._groups.clear()
        self._pools.clear()
        if self._cluster is not None:
            self._cluster.shutdown()

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """See `Site`."""
        key = (layout.processes, "cuda" if check.device == "cuda" else self._device)
        try:
            if key not in self._groups:
                if key[1] == "cuda":
                    self._make_room(layout.processes)
                self._groups[key] = self._started(record.name, *key)
            seen: list[Seen] = self._groups[key].call("act", record, check, number, layout, self._models, directory)
            return seen
        except Exception:
            self._end(key)  # ranks that did not fail wait for those that did
            raise

    def failed(self, layout: Layout) -> None:
        """Nothing to do: each act has engines of its own."""

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """See `Site`: workers run under this interpreter."""
        return {}

    def _started(self, backend: str, processes: int, device: Any) -> WorkerGroup:
        pool = ResourcePool([processes], gpus_per_process=int(device == "cuda"), name=f"{processes}-{device}")
        self._pools[processes, device] = pool
        spec = WorkerSpec(EngineUnderTest)
        return WorkerGroup(pool, spec, name=f"{backend}-{processes}", device=device, timeout=self._seconds)

    def _make_room(self, gpus: int) -> None:
        """End groups that hold GPUs, where the others do not suffice."""
        holding = [key for key in self._groups if key[1] == "cuda"]
        if sum(processes for processes, _ in holding) + gpus > visible_gpus():
            for key in holding:
                self._end(key)

    def _end(self, key: tuple[int, str]) -> None:
        group, pool = self._groups.pop(key, None), self._pools.pop(key, None)
        if group is not None:
            group.shutdown(timeout=0.1)
        if pool is not None:
            pool.shutdown()


class RolloutSite:
    """One process with one replica in it, under the interpreter of the backend's runtime.

    Args:
        python: path of that interpreter; None: this process's own.
        env: environment variables of the process.
        device: what the engine runs on.
        seconds: longest an act may take, a launch included.
    """

    def __init__(self, python: str | None, env: Mapping[str, str], device: Device, seconds: float):
        self._seconds = seconds
        self._spec = WorkerSpec(ReplicaUnderTest).options(python=python, env=dict(env) or None, distributed=False)
        self._device: Device = device
        self._group: WorkerGroup | None = None
        self._pool: ResourcePool | None = None
        self._layout: Layout | None = None
        self._made_for: tuple[str, str, str | None] | None = None  # engine, layout and model of what is launched
        self._cluster: Cluster | None = None
        self._models = {name: rollout_model(name) for name in ROLLOUT_MODELS}

    def open(self) -> None:
        """See `Site`."""
        self._cluster = start_ray()

    def close(self) -> None:
        """See `Site`."""
        self._end()
        if self._cluster is not None:
            self._cluster.shutdown()

    def act(self, record: Any, check: RolloutCheck, number: int, layout: Layout, directory: str) -> list[Seen]:
        """See `Site`."""
        made_for = (record.engine, layout.name, check.model)
        if self._made_for not in (None, made_for):
            self.failed(layout)
        if self._layout != layout or check.fresh:
            self._end()  # a layout's GPUs are its own
        self._made_for = made_for
        try:
            group = self._running(record, layout)
            seen: list[Seen] = group.call("act", record, check, layout, self._models, directory)
        except WorkerDied as error:
            self._end()
            if not check.ends:
                raise
            return [Seen(0, 1, True, error)]
        if check.ends:
            self._end()
        elif check.breaks:
            self.failed(layout)
        return seen

    def failed(self, layout: Layout) -> None:
        """See `Site`: the engine is ended, and with it its process, unless that can take another."""
        self._made_for = None
        if self._group is None:
            return
        try:
            if self._group.call("forget", timeout=END_SECONDS) == [True]:
                return
        except Exception as error:
            log.info("%s could not be ended: %s", self._group.name, error)
        self._end()

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """See `Site`."""
        if self._group is None:
            return {}
        found: dict[str, str] = self._group.call("versions", list(names))[0]
        return found

    def _running(self, record: RolloutBackend, layout: Layout) -> WorkerGroup:
        if self._group is None:
            gpus = gpus_of(record, layout) if self._device == "cuda" else 0
            self._pool = ResourcePool([1], gpus_per_process=gpus, name=f"rollout-{self._device}")
            self._group = WorkerGroup(
                self._pool, self._spec, name=f"{record.name}-rollout", device=self._device, timeout=self._seconds
            )
            self._layout = layout
        return self._group

    def _end(self) -> None:
        group, self._group, self._made_for = self._group, None, None
        pool, self._pool = self._pool, None
        if group is not None:
            group.shutdown(timeout=END_SECONDS)
        if pool is not None:
            pool.shutdown()


class TransportSite:
    """This process: both ends of a transport, each on threads.

    Args:
        seconds: deadline of all that is to succeed, or to fail at once.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def open(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """See `Site`."""
        from enginehouse_testing.link import Link

        return [Seen(0, 1, True, check.acts[number](Link(record, layout.processes, self._seconds)))]

    def failed(self, layout: Layout) -> None:
        """Nothing to do: each act has connections of its own."""

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """See `Site`."""
        return {}


class HereSite:
    """This process: a function, or a class, of which each act makes its own trial, on a thread with a deadline.

    Args:
        given: what it is tried with.
        seconds: longest an act may take.
    """

    def __init__(self, given: Given, seconds: float) -> None:
        self._given, self._seconds = given, seconds

    def open(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def act(self, record: Any, check: Check, number: int, layout: Layout, directory: str) -> list[Seen]:
        """See `Site`. A thread that does not end is left behind."""
        made = self._trial(record, directory)
        ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((check.acts[number](made), None))
            except BaseException as error:  # whatever it is, it is the check's result
                ended.put((None, error))

        threading.Thread(target=run, name=f"{record.name}-{check.name}", daemon=True).start()
        try:
            value, error = ended.get(timeout=self._seconds)
        except queue.Empty:
            raise TimeoutError(f"it took more than {self._seconds:g} s") from None
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}")
        return [Seen(0, 1, True, value)]

    def failed(self, layout: Layout) -> None:
        """Nothing to do: each act has a trial of its own."""

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """See `Site`."""
        return {}

    def _trial(self, record: Any, directory: str) -> Any:
        """What an act is given."""
        if isinstance(record, Loss):
            from enginehouse_testing.loss_trial import LossTrial

            return LossTrial(record, self._given)
        if isinstance(record, Advantage):
            from enginehouse_testing.advantage_trial import AdvantageTrial

            return AdvantageTrial(record, self._given)
        if isinstance(record, Tracker):
            from enginehouse_testing.tracker_trial import TrackerTrial

            return TrackerTrial(record, self._given, Path(directory))
        from enginehouse_testing.environment_trial import EnvironmentTrial

        return EnvironmentTrial(record, self._given)


class RewardSite(HereSite):
    """As `HereSite`, with processes of reward pools that all acts share, as long as none fails."""

    _pools: tuple[RewardPool, ...] = ()

    def close(self) -> None:
        """End the processes."""
        pools, self._pools = self._pools, ()
        for pool in pools:
            pool.close()

    def failed(self, layout: Layout) -> None:
        """What hung or was kept there is gone."""
        self.close()

    def _trial(self, record: Any, directory: str) -> Any:
        from enginehouse_testing.reward_trial import RewardTrial, pool_of

        if not self._pools:
            watched = {"watched": record.function, "watched_arguments": dict(self._given.arguments)}
            self._pools = (
                pool_of(record.function, self._given.arguments, self._given.seconds),
                pool_of("enginehouse_testing.watched:printed_bytes", watched, self._seconds),  # with its import
            )
        return RewardTrial(record, self._given, *self._pools)
