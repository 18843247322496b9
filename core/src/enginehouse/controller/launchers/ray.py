"""Worker processes as Ray actors: one `Host` actor per rank, placed on a pool's bundles."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from enginehouse.controller.dispatch import Call
from enginehouse.controller.errors import GroupClosed, WorkerError
from enginehouse.controller.launchers import rendezvous
from enginehouse.controller.launchers.diagnosis import Diagnosis
from enginehouse.controller.launchers.encoding import encode, find_cause, sending_error
from enginehouse.controller.launchers.handshake import check_identity
from enginehouse.controller.launchers.host import Facts
from enginehouse.controller.launchers.import_paths import own_import_paths
from enginehouse.controller.launchers.interface import Lane, LaunchOptions, WorkerPlace
from enginehouse.controller.launchers.ray_actors import open_direct, open_lanes, start_actors
from enginehouse.controller.launchers.ray_call import RayCall
from enginehouse.controller.launchers.reaping import end_or_warn, kill_workers
from enginehouse.controller.placement_group import Lease
from enginehouse.controller.pool import ResourcePool
from enginehouse.controller.ray_access import ENDING_SECONDS, ray_access
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext
from enginehouse.errors import first_line

SETTLE_SECONDS = 10.0
"""Time in seconds that a call waits for ranks that still run an earlier call, which failed on another rank."""
HURRY_SECONDS = 3.0
"""Time limit in seconds for the workers' shutdown if the group is broken or the run was interrupted."""
NO_ARGUMENTS: Call = ((), {})


class RayProcesses:
    """The Ray actors of one group, or of several colocated groups, from one start to its end. A restart makes a new
    object.

    Args:
        lease: places of the processes, one per rank.
        roles: worker spec of each role, which runs in every process.

    Raises:
        WorkerError: a worker died, raised, or was not built in time. No process is left.
    """

    def __init__(self, lease: Lease, roles: Mapping[str, WorkerSpec], options: LaunchOptions):
        self.roles = dict(roles)
        self.options = options
        self.places: list[WorkerPlace] = []
        self._lease = lease
        self._lock = threading.RLock()
        self._broken: str | None = None
        self._ended: str | None = None
        self._stragglers: tuple[RayCall, tuple[int, ...]] | None = None
        self._stuck: set[int] = set()
        self._in_a_hurry = False
        self._local: dict[int, psutil.Process] = {}
        self._facts: Sequence[Facts] = ()
        self._actors: list[Any] = []
        self._meshes: dict[str, list[Mesh | None]] = {}
        deadline = time.monotonic() + options.start_timeout
        slots = lease.slots
        try:
            with ray_access:
                for actor in start_actors(slots, self.roles, options):
                    self._actors.append(actor)
                self._lanes = open_lanes(self._actors)
                self._splitting_lanes = open_lanes(self._actors, splitting=True)
                self._direct = open_direct(self._actors, self.roles)
                self._locate(deadline)
                self._build(deadline)
        except BaseException:
            self._kill(patience=2.0)
            raise

    @classmethod
    def launch(cls, pool: ResourcePool, roles: Mapping[str, WorkerSpec], options: LaunchOptions) -> RayProcesses:
        """Lease places on a pool, and start a process at each.

        Raises:
            PlacementError: the pool is not available.
            WorkerError: a worker could not be built. No process is left.
        """
        lease = pool.lease(options.name)
        try:
            return cls(lease, roles, options)
        except BaseException:
            lease.end()
            raise

    @property
    def broken(self) -> str | None:
        return self._ended or self._broken

    def _locate(self, deadline: float) -> None:
        """Wait for the processes to run, and store their places."""
        import ray

        # messages need a place of each rank before the process reports it
        self.places = [WorkerPlace(rank, 0, 1, "not placed yet", 0) for rank in range(len(self._actors))]
        facts: list[Facts] = self._start_call(
            "start", {rank: actor.facts.remote() for rank, actor in enumerate(self._actors)}, deadline
        )
        self._facts = facts
        here = ray.get_runtime_context().get_node_id()
        for rank, fact in enumerate(facts):
            neighbours = [other for other, neighbour in enumerate(facts) if neighbour.node_id == fact.node_id]
            self.places[rank] = WorkerPlace(
                rank, neighbours.index(rank), len(neighbours), fact.node, fact.pid, fact.log_files
            )
            if fact.node_id == here:
                with suppress(psutil.Error):
                    self._local[rank] = psutil.Process(fact.pid)
        self._lease.note_devices([fact.devices for fact in facts])
        for rank, fact in enumerate(facts):
            check_identity(self.options.name, rank, getattr(fact, "identity", None))

    def _build(self, deadline: float) -> None:
        from ray import cloudpickle

        size = len(self._facts)
        store = None
        if any(spec.distributed for spec in self.roles.values()):
            address = "127.0.0.1" if len({fact.node_id for fact in self._facts}) == 1 else self._facts[0].node
            seconds = max(deadline - time.monotonic(), 1.0)
            ports = {
                rank: actor.prepare.remote(None if rank else address, seconds)
                for rank, actor in enumerate(self._actors)
            }
            store = (address, self._start_call("rendezvous", ports, deadline)[0])
        pickled = cloudpickle.dumps(self.roles)
        elsewhere = any(spec.python is not None for spec in self.roles.values())
        paths = own_import_paths(sys.path, elsewhere)
        refs = {}
        for place, actor in zip(self.places, self._actors):
            contexts = {
                role: ProcessContext(
                    role=role, rank=place.rank, world_size=size, local_rank=place.local_rank, node=place.node,
                    device=self.options.device, seed=self.options.seed, labels={"roles": tuple(self.roles)},
                )
                for role in self.roles
            }  # fmt: skip
            variables = rendezvous.rank_variables(place.rank, size, place.local_rank, place.local_world_size, store)
            refs[place.rank] = actor.build.remote(pickled, contexts, variables, paths)
        built = self._start_call("__init__", refs, deadline)
        self._meshes = {role: [meshes[role] for meshes in built] for role in self.roles}

    def _start_call(self, method: str, refs: dict[int, Any], deadline: float) -> list[Any]:
        return RayCall(self, self.options.name, method, refs, self.options.start_timeout, deadline).wait()

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
    ) -> RayCall:
        """Send a call. One lock keeps the order of calls the same on every rank."""
        self._refuse_if_broken(role, method)
        with ray_access:
            direct = None if keeps_back or lane == "urgent" else self._direct.get((role, method))
            if not all(call is None or (call == NO_ARGUMENTS and rank in keep) for rank, call in enumerate(calls)):
                direct = None
            encoded: list[tuple[Any, ...] | None]
            if direct is not None:
                encoded = [None if call is None else () for call in calls]
            else:
                encoded = encode(role, method, calls, dict.fromkeys(keep, "split" if keeps_back else "whole"))
            with self._lock:
                self._refuse_if_broken(role, method)
                if self._stragglers:
                    self._wait_for_stragglers(role, method)
                lanes, splitting = direct or self._lanes[lane], self._splitting_lanes[lane]
                refs: dict[int, Any] = {}
                rows: dict[int, Any] = {}
                rank = 0
                try:
                    for rank, parts in enumerate(encoded):
                        if parts is None:
                            continue
                        if keeps_back and rank in keep:
                            refs[rank], rows[rank] = splitting[rank].remote(*parts)
                        else:
                            refs[rank] = lanes[rank].remote(*parts)
                except BaseException as error:
                    if refs:  # the next call waits for the ranks that already have this call
                        call = RayCall(self, role, method, refs, timeout, time.monotonic() + timeout)
                        self._stragglers = call, tuple(refs)
                    if isinstance(error, Exception):
                        raise sending_error(role, method, rank, error) from find_cause(error)
                    raise
            return RayCall(self, role, method, refs, timeout, time.monotonic() + timeout, rows, patient=patient)

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        if refresh or role not in self._meshes:
            self._refuse_if_broken(role, "mesh")
            refs = {rank: actor.mesh.remote(role) for rank, actor in enumerate(self._actors)}
            timeout = self.options.timeout
            call = RayCall(self, role, "mesh", refs, timeout, time.monotonic() + timeout, harmless=True)
            self._meshes[role] = call.wait()
        return self._meshes[role]

    def hurry(self) -> None:
        """Record that a wait was interrupted. A shutdown then waits only `HURRY_SECONDS` for busy ranks."""
        self._in_a_hurry = True

    def late(self, call: RayCall) -> WorkerError:
        """Return the error of a call whose deadline passed. The group breaks unless only the outputs are late."""
        diagnosis = self._diagnosis(call)
        error = diagnosis.late()
        if diagnosis.deadly or not (diagnosis.only_slow or call.harmless):
            self._stuck |= set(diagnosis.unfinished())
            self._break(error)
        return error

    def failed(self, call: RayCall, error: Exception) -> WorkerError:
        """Return the error of a call that failed in Ray. A rank's death breaks the group, but an exception does not."""
        diagnosis = self._diagnosis(call)
        failure = diagnosis.failed(error)
        if diagnosis.deadly:
            self._stuck |= {failure.rank, *diagnosis.unfinished()}
            self._break(failure)
        elif not call.harmless and (busy := diagnosis.unfinished()):
            self._stragglers = (call, tuple(busy))
        return failure

    def idle_seconds(self, call: RayCall) -> float:
        """Return the seconds since any of the ranks that still run a call last made progress; infinite if none did."""
        return self._diagnosis(call).idle_seconds()

    def _diagnosis(self, call: RayCall) -> Diagnosis:
        return Diagnosis(
            role=call.role, method=call.method, timeout=call.timeout, refs=call.refs, places=self.places,
            actors=self._actors, local=self._local, ended=self._ended, put_off=call.put_off,
        )  # fmt: skip

    def _break(self, error: WorkerError) -> None:
        if self._broken is None:
            self._broken = first_line(error)

    def _refuse_if_broken(self, role: str, method: str) -> None:
        if (why := self.broken) is not None:
            cure = "" if self._ended else "; restart() makes the group usable again"
            raise GroupClosed(f"{role}.{method} cannot be called any more: {why}{cure}", why)

    def _wait_for_stragglers(self, role: str, method: str) -> None:
        """Wait briefly for ranks that were busy when another rank raised. A rank that stays busy breaks the group."""
        import ray

        assert self._stragglers is not None
        call, ranks = self._stragglers
        refs = [call.refs[rank] for rank in ranks]
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=SETTLE_SECONDS)
        if busy:
            stuck = [rank for rank in ranks if call.refs[rank] in busy]
            self._stuck |= set(stuck)
            self._broken = f"rank(s) {stuck} still run {call.role}.{call.method}, which failed on another rank"
            self._refuse_if_broken(role, method)
        self._stragglers = None

    def restarted(self) -> RayProcesses:
        """Start in the same places, or on other nodes if a node has left."""
        with self._lock:
            if (why := self._ended) is not None:
                raise GroupClosed(f"{self.options.name} cannot be restarted: {why}", why)
            self._ended = f"{self.options.name} is being restarted"
        try:
            self._end(timeout=10.0)
            self._lease.renew()
            fresh = RayProcesses(self._lease, self.roles, self.options)
        except BaseException as error:
            self._broken = f"its restart failed: {first_line(error)}"
            self._ended = None
            raise
        self._ended = f"{self.options.name} was restarted"
        return fresh

    def shutdown(self, timeout: float = 10.0) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._end(timeout)
            self._ended = f"{self.options.name} was shut down"
            self._lease.end()

    def _end(self, timeout: float) -> None:
        """Shut down the workers that still respond, and kill the processes."""
        import ray

        if self._broken or self._stragglers or self._in_a_hurry:
            timeout = min(timeout, HURRY_SECONDS)

        def close_workers() -> None:
            refs = [actor.close.remote(timeout) for rank, actor in enumerate(self._actors) if rank not in self._stuck]
            if refs:
                ray.wait(refs, num_returns=len(refs), timeout=timeout)

        if ray.is_initialized():
            end_or_warn("shut workers down", close_workers, timeout + ENDING_SECONDS)
        self._kill(patience=2.0)

    def _kill(self, patience: float) -> None:
        """End the processes. The actors' handles are kept, so that a future can still find the cause of an error."""
        remote_facts = [fact for rank, fact in enumerate(self._facts) if rank not in self._local]
        elsewhere = [(fact.node_id, fact.pid, fact.started) for fact in remote_facts]
        kill_workers(self._actors, self._local, elsewhere, patience)
        self._stuck = set(range(len(self._actors)))
