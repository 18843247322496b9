"""A call to Ray actors that was sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.future import StillRunning
from enginehouse.controller.launchers.failure import CallSite
from enginehouse.controller.launchers.host import OutputReference
from enginehouse.controller.ray_access import LOOK_SECONDS, ray_access
from enginehouse.controller.shards import Shard, ShardFacts, get_last, replace_last

if TYPE_CHECKING:
    from enginehouse.controller.launchers.ray import RayProcesses

FETCH_SECONDS = 60.0
"""Time limit in seconds to fetch outputs from other nodes, if a call ended in time but its result is requested after
the deadline."""


@dataclass(eq=False, slots=True)
class RayCall:
    """A `PendingCall` of Ray actors.

    Attributes:
        refs: Ray's reference to the result of each called rank.
        timeout: time limit in seconds.
        deadline: time limit of the call, by `time.monotonic`.
        rows: Ray's reference to the batch of each rank whose result was split.
        harmless: True if the group does not break when the deadline passes, because the call only waits behind other
            calls and blocks none of them.
        patient: True if progress of the ranks postpones the deadline.
        put_off: True once the deadline was postponed.
    """

    processes: RayProcesses
    role: str
    method: str
    refs: dict[int, Any]
    timeout: float
    deadline: float
    rows: Mapping[int, Any] = field(default_factory=dict)
    harmless: bool = False
    patient: bool = False
    put_off: bool = field(default=False, init=False)
    _values: list[Any] | None = field(default=None, init=False)
    """Results of the ranks, if a callback has received them from Ray."""

    def wait(self, limit: float | None = None) -> list[Any]:
        """Wait with one `ray.get`, and look for the cause only if it fails."""
        with ray_access:
            values, failure = self._await_values(None if limit is None else time.monotonic() + limit)
            if failure is not None:
                raise failure  # raised here, so that its cause is the worker's traceback and not Ray's own error
            if self.rows:
                values = [self._shard(rank, value) for rank, value in zip(self.refs, values)]
            if len(values) == len(self.processes.places):
                return values
            outputs: list[Any] = [None] * len(self.processes.places)
            for rank, value in zip(self.refs, values):
                outputs[rank] = value
            return outputs

    def _await_values(self, until: float | None) -> tuple[list[Any], Exception | None]:
        """Return the ranks' results, or the error. `until` is a time of `time.monotonic()`."""
        import ray

        while True:
            begun = time.monotonic()
            limit = None if until is None else max(until - begun, 0.0)
            seconds = max(self.deadline - begun, 0.0)
            try:
                return self._get_values(limit, seconds), None
            except ray.exceptions.GetTimeoutError:
                if limit is not None and (limit < seconds or (limit < FETCH_SECONDS and self._ended())):
                    return [], StillRunning(f"{self.role}.{self.method} still runs after {limit:g} s")
                if self.overdue():
                    return [], self.processes.late(self)
            except ClusterLost:
                raise
            except Exception as error:
                return [], self.processes.failed(self, error)
            except BaseException:
                self.hurry()
                raise

    def _get_values(self, limit: float | None, seconds: float) -> list[Any]:
        """Return the ranks' results. After the deadline, return only existing results, with time to fetch them."""
        import ray

        if self._values is not None:
            values, self._values = self._values, None
            return values
        refs = list(self.refs.values())
        until = time.monotonic() + (seconds if limit is None else min(limit, seconds))
        while (seconds := until - time.monotonic()) > LOOK_SECONDS:
            with suppress(ray.exceptions.GetTimeoutError):
                return ray.get(refs, timeout=LOOK_SECONDS)
            ray_access.check()
        try:
            return ray.get(refs, timeout=max(seconds, 0.0))
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() < self.deadline or not self._ended():
                raise
        return ray.get(refs, timeout=FETCH_SECONDS if limit is None else min(limit, FETCH_SECONDS))

    def _ended(self) -> bool:
        """Return True if every rank has ended, even if outputs are still on other nodes."""
        import ray

        refs = list(self.refs.values())
        return not ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[1]

    def _shard(self, rank: int, value: Any) -> Any:
        """Replace the `ShardFacts` of a batch in a result by a `Shard`; return any other value unchanged."""
        facts = get_last(value)
        if not isinstance(facts, ShardFacts):
            return value
        origin = f"{self.role} rank {rank} on node {self.processes.places[rank].node}, method {self.method!r}"
        return replace_last(value, Shard(self.rows[rank], facts, origin))

    def done(self) -> bool:
        with ray_access:
            return self._ended() or self.overdue()

    def overdue(self) -> bool:
        if time.monotonic() < self.deadline:
            return False
        if self.patient:
            with ray_access:
                idle = self.processes.idle_seconds(self)
            if idle < self.timeout:
                self.deadline, self.put_off = time.monotonic() + self.timeout - idle, True
                return False
        return True

    def add_done_callback(self, callback: Callable[[bool], object]) -> None:
        """Register a callback. Ray runs it in its own thread with each rank's value, which is kept for `wait`."""
        values: dict[int, Any] = {}
        called, lock = False, threading.Lock()

        def note_end(rank: int, value: futures.Future[Any]) -> None:
            nonlocal called
            if well := value.exception() is None:
                values[rank] = value.result()
            with lock:
                if called or (well and len(values) < len(self.refs)):
                    return
                called = True
            if well:
                self._values = [values[rank] for rank in self.refs]
            callback(well)

        with ray_access:
            for rank, ref in self.refs.items():
                ref.future().add_done_callback(partial(note_end, rank))

    def look(self) -> None:
        ray_access.check()

    def hurry(self) -> None:
        self.processes.hurry()

    def reference(self, rank: int) -> OutputReference | None:
        if rank not in self.refs:
            return None
        place = self.processes.places[rank]
        return OutputReference(self.refs[rank], CallSite(self.role, rank, place.node, place.pid, self.method))
