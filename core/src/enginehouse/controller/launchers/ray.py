"""Worker processes as Ray actors: one `Host` actor a rank, placed on a pool's bundles."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import psutil

from enginehouse.controller.cluster import end_processes
from enginehouse.controller.dispatch import Call
from enginehouse.controller.errors import ClusterLost, ControllerError, GroupClosed, WorkerError
from enginehouse.controller.future import StillRunning
from enginehouse.controller.launchers import rendezvous
from enginehouse.controller.launchers.diagnosis import Diagnosis
from enginehouse.controller.launchers.encoding import encode, find_cause, sending_error
from enginehouse.controller.launchers.handshake import check_identity
from enginehouse.controller.launchers.host import VISIBLE, Facts, Host, OutputReference, log_level_for_workers
from enginehouse.controller.launchers.import_paths import own_import_paths
from enginehouse.controller.launchers.interface import Lane, LaunchOptions, WorkerPlace
from enginehouse.controller.launchers.node_paths import check_nodes, needed_paths
from enginehouse.controller.launchers.reaping import REACH_SECONDS, Ending
from enginehouse.controller.placement_group import Lease, Slot, find_nodes
from enginehouse.controller.pool import ResourcePool
from enginehouse.controller.ray_access import ENDING_SECONDS, LOOK_SECONDS, ray_access
from enginehouse.controller.registration import is_async, registered_methods
from enginehouse.controller.shards import Shard, ShardFacts, get_last, replace_last
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext
from enginehouse.errors import first_line
from enginehouse.runtimes.probe import check_interpreter

log = logging.getLogger(__name__)

ASYNC_CALLS = 32
"""Most async calls a process runs at once; more wait their turn."""
URGENT_CALLS = 8
"""As many urgent ones beside them."""
SETTLE_SECONDS = 10.0
"""How long a call waits for ranks that are still busy with an earlier one that failed elsewhere."""
HURRY_SECONDS = 3.0
"""How long workers get to shut down where the group is broken or the run was interrupted."""
FETCH_SECONDS = 60.0
"""How long outputs get to come here from other nodes where the call ended in time and is asked for late."""
NO_ARGUMENTS: Call = ((), {})


class RayCall:
    """A call on its way to Ray actors. A harmless one may come late: it waits behind others, and holds nothing up. The
    deadline of a patient one is put off while its ranks get on."""

    def __init__(
        self,
        processes: RayProcesses,
        role: str,
        method: str,
        refs: dict[int, Any],
        timeout: float,
        deadline: float | None = None,
        rows: Mapping[int, Any] | None = None,
        harmless: bool = False,
        patient: bool = False,
    ):
        self.processes = processes
        self.role = role
        self.method = method
        self.refs = refs
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if deadline is None else deadline
        self.rows = rows or {}
        self.harmless = harmless
        self.patient = patient
        self.put_off = False
        self._came: list[Any] | None = None  # what the ranks returned, where Ray brought it to a callback

    def wait(self, limit: float | None = None) -> list[Any]:
        """See `Pending.wait`: the happy path is one `ray.get`; looking into it starts when that fails."""
        with ray_access:
            return self._wait(limit)

    def _wait(self, limit: float | None) -> list[Any]:
        values, failure = self._awaited(None if limit is None else time.monotonic() + limit)
        if failure is not None:
            raise failure  # here, so that its cause stays the worker's traceback and Ray's own error is not shown
        if self.rows:
            values = [self._shard(rank, value) for rank, value in zip(self.refs, values)]
        if len(values) == len(self.processes.places):
            return values
        outputs: list[Any] = [None] * len(self.processes.places)
        for rank, value in zip(self.refs, values):
            outputs[rank] = value
        return outputs

    def _awaited(self, until: float | None) -> tuple[list[Any], Exception | None]:
        """What the ranks returned, or why they did not; `until` by `time.monotonic()`."""
        import ray

        while True:
            begun = time.monotonic()
            limit = None if until is None else max(until - begun, 0.0)
            left = max(self.deadline - begun, 0.0)
            try:
                return self._outputs(limit, left), None
            except ray.exceptions.GetTimeoutError:
                if limit is not None and (
                    limit < left or (limit < FETCH_SECONDS and not _running(list(self.refs.values())))
                ):
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

    def _outputs(self, limit: float | None, left: float) -> list[Any]:
        """What the ranks returned; past the deadline, what is there by now, and time to bring it here."""
        import ray

        if self._came is not None:
            came, self._came = self._came, None
            return came
        refs = list(self.refs.values())
        until = time.monotonic() + (left if limit is None else min(limit, left))
        while (left := until - time.monotonic()) > LOOK_SECONDS:
            with suppress(ray.exceptions.GetTimeoutError):
                return ray.get(refs, timeout=LOOK_SECONDS)
            ray_access.check()
        try:
            return ray.get(refs, timeout=max(left, 0.0))
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() < self.deadline or _running(refs):
                raise
        return ray.get(refs, timeout=FETCH_SECONDS if limit is None else min(limit, FETCH_SECONDS))

    def _shard(self, rank: int, value: Any) -> Any:
        """A shard where a rank told a batch's facts, else what it returned."""
        facts = get_last(value)
        if not isinstance(facts, ShardFacts):
            return value
        origin = f"{self.role} rank {rank} on node {self.processes.places[rank].node}, method {self.method!r}"
        return replace_last(value, Shard(self.rows[rank], facts, origin))

    def done(self) -> bool:
        """See `Pending.done`."""
        with ray_access:
            return not _running(list(self.refs.values())) or self.overdue()

    def overdue(self) -> bool:
        """See `Pending.overdue`."""
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
        """See `Pending.add_done_callback`. Ray calls back in a thread of its own, with each rank's value."""
        came: dict[int, Any] = {}
        told, lock = False, threading.Lock()

        def ended(rank: int, value: futures.Future[Any]) -> None:
            nonlocal told
            if well := value.exception() is None:
                came[rank] = value.result()
            with lock:
                if told or (well and len(came) < len(self.refs)):
                    return
                told = True
            if well:
                self._came = [came[rank] for rank in self.refs]
            callback(well)

        with ray_access:
            for rank, ref in self.refs.items():
                ref.future().add_done_callback(partial(ended, rank))

    def look(self) -> None:
        """See `Pending.look`."""
        ray_access.check()

    def hurry(self) -> None:
        """See `Pending.hurry`."""
        self.processes.hurry()

    def reference(self, rank: int) -> Any:
        """What stands for one rank's output: Ray's reference to it, and whose it is."""
        if rank not in self.refs:
            return None
        place = self.processes.places[rank]
        return OutputReference(self.refs[rank], self.role, rank, place.node, place.pid, self.method)


class RayProcesses:
    """The Ray actors of one group (or of several colocated ones), from one start to one end: a restart makes others.

    Args:
        lease: their places, one a rank.
        roles: what lives in each process.
        options: how they are launched.

    Raises:
        WorkerError: a worker died or raised while it was built, or did not get there in time. No process is left.
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
        self._lanes: dict[Lane, list[Any]] = {}
        self._splitting_lanes: dict[Lane, list[Any]] = {}
        self._direct: dict[tuple[str, str], list[Any]] = {}
        deadline = time.monotonic() + options.start_timeout
        slots = lease.slots
        try:
            with ray_access:
                host = self._host_class()
                self._check_nodes(slots)
                for rank, slot in enumerate(slots):
                    self._actors.append(self._actor(host, rank, slot, len(slots)))
                self._open_lanes()
                facts = self._settle_in(deadline)
                self._build(facts, deadline)
        except BaseException:
            self._kill(patience=2.0)
            raise

    @classmethod
    def launch(cls, pool: ResourcePool, roles: Mapping[str, WorkerSpec], options: LaunchOptions) -> RayProcesses:
        """Take a place on a pool and start processes there.

        Raises:
            PlacementError: the pool cannot be had.
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
        """Why no further call is possible."""
        return self._ended or self._broken

    # Starting

    def _host_class(self) -> Any:
        import ray

        return ray.remote(  # type: ignore[call-overload]
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"loop": ASYNC_CALLS, "urgent": URGENT_CALLS, "control": 1},
            **self._runtime_env(),
        )(_with_direct_methods(_with_control_lane(Host), self.roles))

    def _open_lanes(self) -> None:
        """Make what calls are sent through, once: Ray's options cost as much as a call."""
        groups: dict[Lane, dict[str, str]] = {
            "main": {},
            "loop": {"concurrency_group": "loop"},
            "urgent": {"concurrency_group": "urgent"},
        }
        for lane, group in groups.items():
            self._lanes[lane] = [actor.call.options(**group) if group else actor.call for actor in self._actors]
            self._splitting_lanes[lane] = [actor.call.options(num_returns=2, **group) for actor in self._actors]
        self._direct = {
            (role, method): [getattr(actor, _direct_name(role, method)) for actor in self._actors]
            for role, spec in self.roles.items()
            for method in registered_methods(spec.cls)
        }

    def _actor(self, host: Any, rank: int, slot: Slot, world_size: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from enginehouse.plugin import plugins

        variables = self._agreed("variables")
        variables |= {"OMP_NUM_THREADS": str(self.options.threads), **plugins().environment()}
        if not slot.gpus:  # Ray (2.60) would show it all that the node has
            variables[VISIBLE] = ",".join(slot.devices or ())
        placed = PlacementGroupSchedulingStrategy(slot.placement_group, placement_group_bundle_index=slot.bundle)
        placed_host = host.options(num_cpus=slot.cpus, num_gpus=slot.gpus, scheduling_strategy=placed)
        return placed_host.remote(self.options.name, rank, world_size, variables, log_level_for_workers())

    def _runtime_env(self) -> dict[str, Any]:
        """Only what must hold before the interpreter starts goes through Ray: it costs the process its warm start."""
        env, pythons = self._agreed("env"), {spec.python for spec in self.roles.values()}
        if len(pythons) > 1:
            named = sorted(python or "the driver's own" for python in pythons)
            raise ControllerError(f"{self.options.name}: colocated roles want different interpreters: {named}")
        runtime_env: dict[str, Any] = {"env_vars": env} if env else {}
        if (python := pythons.pop()) is not None:
            if os.path.exists(python):  # on other nodes only, it is asked when its worker starts
                check_interpreter(python)
            runtime_env["py_executable"] = python
        return {"runtime_env": runtime_env} if runtime_env else {}

    def _check_nodes(self, slots: Sequence[Slot]) -> None:
        """See that workers of another interpreter can be started where they go."""
        spec = next(iter(self.roles.values()))
        if spec.python is not None:
            check_nodes(self.options.name, find_nodes(slots), needed_paths(spec.python, self._agreed("env")))

    def _agreed(self, which: Literal["env", "variables"]) -> dict[str, str]:
        """Environment variables of all roles, those that their specs have as `which`."""
        agreed: dict[str, str] = {}
        for role, spec in self.roles.items():
            for name, value in getattr(spec, which).items():
                if agreed.setdefault(name, value) != value:
                    raise ControllerError(f"{self.options.name}: roles of one process want different {name} ({role})")
        return agreed

    def _settle_in(self, deadline: float) -> list[Facts]:
        """Wait for the processes to be there, and learn where they are."""
        # until a process has said where it is, all there is to say of it is its rank
        self.places = [WorkerPlace(rank, 0, 1, "not placed yet", 0) for rank in range(len(self._actors))]
        facts: list[Facts] = self._start_call(
            "start", {r: a.facts.remote() for r, a in enumerate(self._actors)}, deadline
        )
        self._know(facts)
        self._lease.note_devices([fact.devices for fact in facts])
        for rank, fact in enumerate(facts):
            check_identity(self.options.name, rank, getattr(fact, "identity", None))
        return facts

    def _know(self, facts: Sequence[Facts]) -> None:
        """Note where the ranks are."""
        import ray

        self._facts = facts
        for rank, fact in enumerate(facts):
            neighbours = [other for other, facts_there in enumerate(facts) if facts_there.node_id == fact.node_id]
            self.places[rank] = WorkerPlace(
                rank=rank, local_rank=neighbours.index(rank), local_world_size=len(neighbours), node=fact.node,
                pid=fact.pid, log_files=fact.log_files,
            )  # fmt: skip
        here = ray.get_runtime_context().get_node_id()
        for rank, fact in enumerate(facts):
            if fact.node_id == here:
                with suppress(psutil.Error):
                    self._local[rank] = psutil.Process(fact.pid)

    def _build(self, facts: Sequence[Facts], deadline: float) -> None:
        from ray import cloudpickle

        size = len(facts)
        store = None
        if any(spec.distributed for spec in self.roles.values()):
            address = "127.0.0.1" if len({fact.node_id for fact in facts}) == 1 else facts[0].node
            left = max(deadline - time.monotonic(), 1.0)
            asked = {r: a.prepare.remote(address if r == 0 else None, left) for r, a in enumerate(self._actors)}
            store = (address, self._start_call("rendezvous", asked, deadline)[0])
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

    # Calling

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
        """See `Processes.submit`. One lock holds the order of calls the same on every rank."""
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
                    if refs:  # the next call waits for the ranks that have it already
                        self._stragglers = RayCall(self, role, method, refs, timeout), tuple(refs)
                    if isinstance(error, Exception):
                        raise sending_error(role, method, rank, error) from find_cause(error)
                    raise
            return RayCall(self, role, method, refs, timeout, rows=rows, patient=patient)

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        """See `Processes.meshes`."""
        if refresh or role not in self._meshes:
            self._refuse_if_broken(role, "mesh")
            refs = {rank: actor.mesh.remote(role) for rank, actor in enumerate(self._actors)}
            self._meshes[role] = RayCall(self, role, "mesh", refs, self.options.timeout, harmless=True).wait()
        return self._meshes[role]

    # Failing

    def hurry(self) -> None:
        """Somebody pressed Ctrl-C while ranks were busy: they may not get to an orderly end in the usual time."""
        self._in_a_hurry = True

    def late(self, call: RayCall) -> WorkerError:
        """The error of a call whose deadline passed; breaks the group, unless all that is late is the way here."""
        diagnosis = self._diagnosis(call)
        error = diagnosis.late()
        if diagnosis.deadly or not (diagnosis.only_slow or call.harmless):
            self._stuck |= set(diagnosis.unfinished())
            self._break(error)
        return error

    def failed(self, call: RayCall, error: Exception) -> WorkerError:
        """The error of a call of which Ray reported one. A death breaks the group; an exception leaves it usable."""
        diagnosis = self._diagnosis(call)
        failure = diagnosis.failed(error)
        if diagnosis.deadly:
            self._stuck |= {failure.rank, *diagnosis.unfinished()}
            self._break(failure)
        elif not call.harmless and (busy := diagnosis.unfinished()):
            self._stragglers = (call, tuple(busy))
        return failure

    def idle_seconds(self, call: RayCall) -> float:
        """How long ago one of the ranks that are still at a call got on; infinite where none did, or says so."""
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
            cure = "" if self._ended else "; the group's restart() brings it back"
            raise GroupClosed(f"{role}.{method} cannot be called any more: {why}{cure}", why)

    def _wait_for_stragglers(self, role: str, method: str) -> None:
        """Give ranks that were busy when another one raised a moment to end; a group with a stuck rank is broken."""
        import ray

        assert self._stragglers is not None
        call, ranks = self._stragglers
        refs = [call.refs[rank] for rank in ranks]
        _, busy = ray.wait(refs, num_returns=len(refs), timeout=SETTLE_SECONDS)
        if busy:
            stuck = [rank for rank in ranks if call.refs[rank] in busy]
            self._stuck |= set(stuck)
            self._broken = f"rank(s) {stuck} are still in {call.role}.{call.method}, which failed on another rank"
            self._refuse_if_broken(role, method)
        self._stragglers = None

    # Ending

    def restarted(self) -> RayProcesses:
        """See `Processes.restarted`: the same places, on other nodes where the nodes they were on have left."""
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
        """See `Processes.shutdown`."""
        with self._lock:
            if self._ended is not None:
                return
            self._end(timeout)
            self._ended = f"{self.options.name} was shut down"
            self._lease.end()

    def _end(self, timeout: float) -> None:
        """End the processes, in order where they still can."""
        import ray

        if self._broken or self._stragglers or self._in_a_hurry:
            timeout = min(timeout, HURRY_SECONDS)
        if ray.is_initialized():
            _have_ended("shut workers down", lambda: self._close_workers(timeout), timeout + ENDING_SECONDS)
        self._kill(patience=2.0)

    def _close_workers(self, timeout: float) -> None:
        import ray

        refs = [actor.close.remote(timeout) for rank, actor in enumerate(self._actors) if rank not in self._stuck]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=timeout)

    def _kill(self, patience: float) -> None:
        """End the processes and what they started. Handles are kept: futures may still ask what became of them."""
        import ray

        family = list(self._local.values())
        for process in self._local.values():
            with suppress(psutil.Error):
                family += process.children(recursive=True)
        if not ray.is_initialized():
            end_processes(family, patience)
            self._stuck = set(range(len(self._actors)))
            return
        elsewhere = [fact for rank, fact in enumerate(self._facts) if rank not in self._local]
        endings: list[Ending] = []

        def begin() -> None:
            if elsewhere:
                endings.append(Ending([(fact.node_id, fact.pid, fact.started) for fact in elsewhere], patience))
            for rank, actor in enumerate(self._actors):
                if rank in self._local:
                    ray.kill(actor, no_restart=True)

        def finish() -> None:
            for ending in endings:
                ending.wait()
            for actor in self._actors:
                ray.kill(actor, no_restart=True)

        _have_ended("kill workers", begin, ENDING_SECONDS)
        end_processes(family, 0.0 if ray_access.stuck else patience)
        _have_ended("kill workers", finish, ENDING_SECONDS + (REACH_SECONDS + patience if endings else 0.0))
        self._stuck = set(range(len(self._actors)))


def _have_ended(what: str, call: Callable[[], object], seconds: float) -> None:
    """See `RayAccess.end`. Whatever Ray says to it, what else ends the processes is done."""
    try:
        ray_access.end(what, call, seconds)
    except Exception as error:
        log.warning("Ray could not %s: %s", what, error)


def _running(refs: list[Any]) -> bool:
    """Whether any of these calls has not ended. One that has may have its output on another node still."""
    import ray

    return bool(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[1])


def _with_control_lane(cls: type) -> type:
    """The host class with what the control lane answers marked for it; `Host` itself knows nothing of Ray."""
    import ray

    for name in ("facts", "ping", "stacks", "idle_seconds"):
        ray.method(concurrency_group="control")(getattr(cls, name))
    return cls


def _with_direct_methods(cls: type, roles: Mapping[str, WorkerSpec]) -> type:
    """The host class with a method without arguments for each registered one.

    Any argument, however small, makes a call that does nothing an eighth slower.
    """
    import ray

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
    return type(cls.__name__, (cls,), methods)


def _direct_name(role: str, method: str) -> str:
    return f"{role}.{method}"
