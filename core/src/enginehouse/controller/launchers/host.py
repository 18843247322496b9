"""The Ray actor every worker process is: it holds the objects of the process's roles and runs their methods.

Four lanes, as Ray concurrency groups: sync methods run on one thread in call order (the default group); async
methods on the process's event loop, each waited for by a thread of group `loop`, or of group `urgent`, so that they run
though every thread of `loop` waits; group `control` answers while all are busy.
"""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from enginehouse.controller.assembly import Assembly
from enginehouse.controller.launchers import rendezvous, worker_logging
from enginehouse.controller.launchers.failure import SourceDied, WorkerFailure
from enginehouse.controller.launchers.handshake import Identity, read_identity
from enginehouse.controller.launchers.role_objects import RoleObjects, act_as
from enginehouse.controller.launchers.stacks import process_stacks
from enginehouse.controller.shards import keep_back
from enginehouse.engines import progress
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Makes a worker write the stacks of its threads to its log, even while native code holds the interpreter lock."""

SWITCH_SECONDS = 0.0005
"""How long a thread of a worker keeps the interpreter while another waits for it."""


VISIBLE, LEFT_AS_THEY_ARE = "CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees; and what tells Ray to leave that as it is."""


Keep = Literal["nothing", "whole", "split"]
"""What of a result comes back: as it is, or a batch in two parts, its facts and (a second Ray object) its rows."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands in a call's arguments for the nth of the values that travel beside it, each stored once for all ranks."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputReference:
    """Stands in a call's arguments for the output of a call that may still be running.

    The reference is held one level down, where Ray does not wait for it: waiting is done on the thread that runs
    the call, so that calls keep their order and the control lane stays free. The rest says whose output it is.
    """

    reference: Any
    role: str
    rank: int
    node: str
    pid: int
    method: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}'s {self.method!r}"

    def value(self) -> Any:
        """Wait for the output.

        Raises:
            SourceDied: the process is gone that was to give it.
        """
        import ray

        try:
            return ray.get(self.reference)
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.NodeDiedError,
            ray.exceptions.OutOfMemoryError,
        ) as error:
            failure = WorkerFailure.of(error, self.role, self.rank, self.node, self.pid, self.method, ())
            raise SourceDied(*failure.args) from None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process says about itself.

    Attributes:
        node: address of its node.
        node_id: Ray's name of it.
        pid: its process id there.
        log_files: its log files there, errors first.
        started: `time.time()` when it began: tells it from a later one with the same id.
        identity: what it runs on.
        devices: the GPUs that Ray gave it, by their numbers on the node.
    """

    node: str
    node_id: str
    pid: int
    log_files: tuple[str, ...]
    started: float
    identity: Identity | None = None
    devices: tuple[str, ...] = ()


class Host:
    """One worker process.

    Args:
        group: the group's name.
        rank: this process's rank.
        world_size: processes in the group.
        variables: environment variables to set, before torch is imported.
        log_level: level of the root logger.
    """

    def __init__(self, group: str, rank: int, world_size: int, variables: Mapping[str, str], log_level: int):
        os.environ.update(variables)
        if VISIBLE not in variables and os.environ.get(LEFT_AS_THEY_ARE):
            os.environ[VISIBLE] = ",".join(own_devices())  # Ray was told not to do it: each would take the first
        # Several threads share the interpreter here: lanes, event loop, an engine's own. At Python's 5 ms a hand-over
        # between them can cost a short call more than its work.
        sys.setswitchinterval(SWITCH_SECONDS)
        # Ctrl-C reaches every process of the terminal; only the driver may act on it, to end things in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if STACKS_SIGNAL is not None:
            faulthandler.register(STACKS_SIGNAL, all_threads=True)
        self._recent = worker_logging.install(group, rank, world_size, log_level)
        self._group = group
        self._rank = rank
        self._objects = RoleObjects()
        self._running: dict[int, str] = {}
        self._node = "?"
        self._store: Any = None

    def facts(self) -> Facts:
        """Where this process is."""
        import ray

        self._node = ray.util.get_node_ip_address()
        node_id = ray.get_runtime_context().get_node_id()
        started = psutil.Process().create_time()
        return Facts(self._node, node_id, os.getpid(), _log_files(), started, read_identity(), own_devices())

    def prepare(self, store_address: str | None, timeout: float) -> int | None:
        """Import torch; on rank 0 (`store_address` given) open the rendezvous and return its port."""
        try:
            import torch.distributed  # noqa: F401

            if store_address is None:
                return None
            self._store, port = rendezvous.open_store(store_address, timeout)
            return port
        except BaseException as error:
            raise self._failure(error, self._group, "rendezvous") from None

    def build(
        self,
        pickled_specs: bytes,
        contexts: Mapping[str, ProcessContext],
        variables: Mapping[str, str],
        paths: list[str],
    ) -> dict[str, Mesh | None]:
        """Build the object of every role; returns their meshes. `paths` are where the driver imports from, too."""
        from ray import cloudpickle

        os.environ.update(variables)
        sys.path += [path for path in paths if path not in sys.path]
        role = self._group
        self._running[threading.get_ident()] = "'__init__'"
        try:
            specs = cloudpickle.loads(pickled_specs)
            for role, spec in specs.items():
                self._objects.build(role, spec, contexts[role])
            return {role: self._objects.mesh(role) for role in specs}
        except BaseException as error:
            raise self._failure(error, role, "__init__") from None
        finally:
            self._running.pop(threading.get_ident(), None)

    def call(self, head: bytes | tuple[Any, ...], *shared: Any) -> Any:
        """Run a method: a sync one on this thread, an async one on the event loop, for which this thread waits.

        Args:
            head: role, method, what to do with the result, args and kwargs; pickled or not.
            shared: values that travel beside the arguments.
        """
        role, method, keep, args, kwargs = pickle.loads(head) if isinstance(head, bytes) else head
        thread = threading.get_ident()
        self._running[thread] = f"{method!r}"
        try:
            if args or kwargs:
                args, kwargs = self._resolved(method, args, kwargs, shared)
                self._running[thread] = f"{method!r}"
            with act_as(role):
                result = getattr(self._objects[role], method)(*args, **kwargs)
                if inspect.iscoroutine(result):
                    del self._running[thread]  # its stack is the coroutine's
                    result = self._objects.loop.submit(result).result()
            return _given_back(result, keep)
        except BaseException as error:
            raise self._failure(error, role, method) from None
        finally:
            self._running.pop(thread, None)

    def mesh(self, role: str) -> Mesh | None:
        """The mesh of a role's object now."""
        return self._objects.mesh(role)

    def close(self, timeout: float) -> None:
        """Shut the objects down, before the process is ended."""
        self._objects.close(timeout)

    def ping(self) -> int:
        """Answer, from the control lane."""
        return self._rank

    def idle_seconds(self) -> float:
        """How long ago this process got on with its work; from the control lane."""
        return progress.idle_seconds()

    def stacks(self) -> tuple[str, tuple[str, ...]]:
        """Stacks of all threads and coroutines, and the last log lines; from the control lane."""
        return process_stacks(self._running, self._objects.loop.running), self._recent.lines()

    def _resolved(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put values where their stand-ins are."""

        def value(given: Any) -> Any:
            if type(given) is Shared:
                given = shared[given.index]
            if type(given) is OutputReference:
                self._running[threading.get_ident()] = f"{method!r}, which waits for {given}"
                return given.value()
            return given.read() if isinstance(given, Assembly) else given

        return tuple(map(value, args)), {name: value(given) for name, given in kwargs.items()}

    def _failure(self, error: BaseException, role: str, method: str) -> WorkerFailure:
        if isinstance(error, SourceDied):
            return error
        passed_on = getattr(error, "cause", None)
        if isinstance(passed_on, WorkerFailure):
            return passed_on  # an argument was the output of a call that had failed on another worker
        return WorkerFailure.of(error, role, self._rank, self._node, os.getpid(), method, self._recent.lines())


def _given_back(result: Any, keep: Keep) -> Any:
    if keep == "split":
        return keep_back(result)
    return result if keep == "whole" else None


def _log_files() -> tuple[str, ...]:
    """Where this process's stderr and stdout go, if to files."""
    found = []
    for stream, number in ((sys.stderr, 2), (sys.stdout, 1)):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # not Linux
            path = str(getattr(stream, "name", ""))
        if os.path.isfile(path):
            found.append(path)
    return tuple(found)


def log_level_for_workers() -> int:
    """The level workers log at: the driver's own for this project, but at least INFO is kept for errors."""
    return min(logging.getLogger("enginehouse").getEffectiveLevel(), logging.INFO)


def own_devices() -> tuple[str, ...]:
    """The GPUs that Ray gave this process."""
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
