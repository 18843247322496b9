"""The Ray actor every worker process is: it holds the objects of the process's roles and runs their methods.

Calls run in four lanes, which are Ray concurrency groups. Sync methods run on one thread in call order (the default
group). Async methods run on the process's event loop; a thread of group `loop` waits for each, or a thread of group
`urgent`, so that urgent calls run though every thread of `loop` waits. Group `control` answers while all are busy.
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
from enginehouse.controller.launchers.failure import CallSite, SourceDied, WorkerFailure
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
"""Time a thread of a worker keeps the interpreter while another waits for it. Lanes, event loop and engine share the
interpreter; at Python's 5 ms a hand-over between them can cost a short call more than its work."""

VISIBLE, LEFT_AS_THEY_ARE = "CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that a process sees, and the one that tells Ray to leave it as it is."""

Keep = Literal["nothing", "whole", "split"]
"""The part of a result that comes back. `"split"` returns a batch in two Ray objects: its facts, and its rows."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Stands in a call's arguments for the nth of the values that travel beside it, each stored once for all ranks."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputReference:
    """Stands in a call's arguments for the output of a call that may still be running.

    Ray does not wait for a reference that is held one level down. So the thread that runs the call waits for it, calls
    keep their order, and the control lane stays free.

    Attributes:
        reference: Ray's reference to the output.
        site: the call that gives it.
    """

    reference: Any
    site: CallSite

    def __str__(self) -> str:
        return f"{self.site.role} rank {self.site.rank}'s {self.site.method!r}"

    def value(self) -> Any:
        """Wait for the output.

        Raises:
            SourceDied: the process that should have given it is dead.
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
            raise SourceDied.pack(error, self.site) from None


@dataclass(frozen=True, slots=True)
class Facts:
    """A process's report of itself.

    Attributes:
        node: address of its node.
        node_id: Ray's name of its node.
        pid: its process id there.
        log_files: its log files there, errors first.
        started: `time.time()` when it began; tells it from a later process with the same id.
        identity: the versions it runs on.
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
        world_size: number of processes in the group.
        variables: environment variables to set before torch is imported.
        log_level: level of the root logger.
    """

    def __init__(self, group: str, rank: int, world_size: int, variables: Mapping[str, str], log_level: int):
        os.environ.update(variables)
        if VISIBLE not in variables and os.environ.get(LEFT_AS_THEY_ARE):
            os.environ[VISIBLE] = ",".join(own_devices())  # Ray was told not to do it: each would take the first
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
        """Report what this process is and where."""
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
        """Build the object of every role and return their meshes; `paths` are the driver's own import paths."""
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
            head: role, method, the part of the result to keep, args and kwargs; pickled or not.
            shared: values that travel beside the arguments.
        """
        role, method, keep, args, kwargs = pickle.loads(head) if isinstance(head, bytes) else head
        thread = threading.get_ident()
        self._running[thread] = f"{method!r}"
        try:
            if args or kwargs:
                args, kwargs = self._resolve(method, args, kwargs, shared)
                self._running[thread] = f"{method!r}"
            with act_as(role):
                result = getattr(self._objects[role], method)(*args, **kwargs)
                if inspect.iscoroutine(result):
                    del self._running[thread]  # its stack is the coroutine's
                    result = self._objects.loop.submit(result).result()
            if keep == "split":
                return keep_back(result)
            return result if keep == "whole" else None
        except BaseException as error:
            raise self._failure(error, role, method) from None
        finally:
            self._running.pop(thread, None)

    def mesh(self, role: str) -> Mesh | None:
        """Return the present mesh of a role's object."""
        return self._objects.mesh(role)

    def close(self, timeout: float) -> None:
        """Shut the objects down, before the process is ended."""
        self._objects.close(timeout)

    def ping(self) -> int:
        """Answer, from the control lane."""
        return self._rank

    def idle_seconds(self) -> float:
        """Return the seconds since this process made progress; from the control lane."""
        return progress.idle_seconds()

    def stacks(self) -> tuple[str, tuple[str, ...]]:
        """Return the stacks of all threads and coroutines, and the last log lines; from the control lane."""
        return process_stacks(self._running, self._objects.loop.running), self._recent.lines()

    def _resolve(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put values where their stand-ins are."""

        def resolve(argument: Any) -> Any:
            if type(argument) is Shared:
                argument = shared[argument.index]
            if type(argument) is OutputReference:
                self._running[threading.get_ident()] = f"{method!r}, which waits for {argument}"
                return argument.value()
            return argument.read() if isinstance(argument, Assembly) else argument

        return tuple(map(resolve, args)), {name: resolve(argument) for name, argument in kwargs.items()}

    def _failure(self, error: BaseException, role: str, method: str) -> WorkerFailure:
        if isinstance(error, SourceDied):
            return error
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerFailure):
            return cause  # an argument was the output of a call that had failed on another worker
        site = CallSite(role, self._rank, self._node, os.getpid(), method)
        return WorkerFailure.pack(error, site, self._recent.lines())


def _log_files() -> tuple[str, ...]:
    """Return the files that this process's stderr and stdout go to."""
    files = []
    for stream, number in ((sys.stderr, 2), (sys.stdout, 1)):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # not Linux
            path = str(getattr(stream, "name", ""))
        if os.path.isfile(path):
            files.append(path)
    return tuple(files)


def log_level_for_workers() -> int:
    """Return the level workers log at: the driver's own for this project, but INFO at most, to go with errors."""
    return min(logging.getLogger("enginehouse").getEffectiveLevel(), logging.INFO)


def own_devices() -> tuple[str, ...]:
    """Return the GPUs that Ray gave this process."""
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
