"""The Ray actor of a worker process, which holds the objects of the process's roles and runs their methods.

Calls run in four lanes, which are Ray concurrency groups. Sync methods run on one thread in call order (the default
group). Async methods run on the process's event loop, while a thread of the group `loop` waits for each of them. Urgent
calls have threads in the group `urgent`, and therefore run even when all threads of `loop` wait. The group `control`
answers even while a method runs.
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
"""Signal on which a worker writes its threads' stacks to its log, even while native code holds the interpreter lock."""

SWITCH_SECONDS = 0.0005
"""Time in seconds that a thread of a worker keeps the interpreter while another thread waits for it. Lanes, event loop
and engine share the interpreter. With Python's default of 5 ms, a switch of threads can take longer than a short
call."""

VISIBLE, LEFT_AS_THEY_ARE = "CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment variables: the GPUs that a process sees, and the setting that stops Ray from changing them."""

Keep = Literal["nothing", "whole", "split"]
"""Part of a result that comes back. `"split"` returns a batch as two Ray objects: its `ShardFacts` and its rows."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Placeholder in a call's arguments for a value that is stored once for all ranks. `index` is the value's place in
    the argument `shared` of `Host.call`."""

    index: int


@dataclass(frozen=True, slots=True)
class OutputReference:
    """Placeholder in a call's arguments for the output of a call that may still run.

    Ray does not wait for a reference inside another object. The thread that runs the call therefore waits for the
    output. Calls keep their order, and the control lane stays free.
    """

    reference: Any
    site: CallSite

    def __str__(self) -> str:
        return f"{self.site.role} rank {self.site.rank}'s {self.site.method!r}"

    def value(self) -> Any:
        """Wait for the output. Raises `SourceDied` if the process that runs the call is dead."""
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
    """A process's report about itself.

    Attributes:
        node_id: Ray's id of the node.
        pid: process id on the node.
        log_files: log files on the node, errors first.
        started: `time.time()` of the process's start, to distinguish it from a later process with the same id.
        devices: ids of the GPUs that Ray assigned to the process, as the node names them.
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
        variables: environment variables to set before the import of torch.
    """

    def __init__(self, group: str, rank: int, world_size: int, variables: Mapping[str, str], log_level: int):
        os.environ.update(variables)
        if VISIBLE not in variables and os.environ.get(LEFT_AS_THEY_ARE):
            os.environ[VISIBLE] = ",".join(own_devices())  # Ray leaves the variable, so each process would use GPU 0
        sys.setswitchinterval(SWITCH_SECONDS)
        # Ctrl-C reaches every process of the terminal, but only the driver may react, to end the run in order.
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
        import ray

        self._node = ray.util.get_node_ip_address()
        node_id = ray.get_runtime_context().get_node_id()
        started = psutil.Process().create_time()
        return Facts(self._node, node_id, os.getpid(), _log_files(), started, read_identity(), own_devices())

    def prepare(self, store_address: str | None, timeout: float) -> int | None:
        """Import torch. Rank 0, which gets a `store_address`, also opens the rendezvous and returns its port."""
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
        """Build the object of every role and return the objects' meshes. `paths` are the driver's import paths of the
        user's code."""
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
        """Run a sync method on this thread, or an async method on the event loop while this thread waits.

        Args:
            head: role, method, the part of the result to keep, args and kwargs; pickled or not.
            shared: values of the `Shared` placeholders in the arguments.
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
                    del self._running[thread]  # the stack of its coroutine is reported instead
                    result = self._objects.loop.submit(result).result()
            if keep == "split":
                return keep_back(result)
            return result if keep == "whole" else None
        except BaseException as error:
            raise self._failure(error, role, method) from None
        finally:
            self._running.pop(thread, None)

    def mesh(self, role: str) -> Mesh | None:
        return self._objects.mesh(role)

    def close(self, timeout: float) -> None:
        """Shut down the objects before the process ends."""
        self._objects.close(timeout)

    def ping(self) -> int:
        """Answer on the control lane."""
        return self._rank

    def idle_seconds(self) -> float:
        """Return the seconds since this process made progress. Runs on the control lane."""
        return progress.idle_seconds()

    def stacks(self) -> tuple[str, tuple[str, ...]]:
        """Return the stacks of all threads and coroutines, and the last log lines. Runs on the control lane."""
        return process_stacks(self._running, self._objects.loop.running), self._recent.lines()

    def _resolve(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace placeholders in the arguments by their values."""

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
    """Return the files that this process's stderr and stdout write to."""
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
    """Return the driver's log level, but at most INFO, so that errors can show the workers' last log lines."""
    return min(logging.getLogger("enginehouse").getEffectiveLevel(), logging.INFO)


def own_devices() -> tuple[str, ...]:
    """Return the GPUs that Ray assigned to this process."""
    import ray

    return tuple(map(str, ray.get_runtime_context().get_accelerator_ids().get("GPU", ())))
