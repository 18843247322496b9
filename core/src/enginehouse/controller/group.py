"""Worker groups: all processes of a role, called like one object."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from enginehouse.controller.collect import wrap_shard
from enginehouse.controller.dispatch import Balanced, Call, Dealt, Mode, resolve_mode, restore_order
from enginehouse.controller.errors import ControllerError, DispatchError, GroupClosed
from enginehouse.controller.future import Future, StillRunning
from enginehouse.controller.launchers.interface import Lane, LaunchOptions, WorkerProcesses
from enginehouse.controller.layout import DataLayout
from enginehouse.controller.pool import ResourcePool
from enginehouse.controller.registration import CallSpec, is_async, registered_methods
from enginehouse.controller.tracing import CallTrace
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import Device
from enginehouse.errors import nearest


class WorkerGroup:
    """A role's workers, one process per rank. Each registered method of the worker class is a method of the group.

    A failed call raises a `WorkerError`. After the death of a rank or a passed deadline, the group is broken and
    rejects further calls with that reason. A group stays usable after an exception that a worker raised.

    Args:
        pool: pool of the processes. The inline launcher needs none.
        spec: the worker class and its arguments.
        name: name of the role, for messages and logs.
        launcher: `"ray"`, or `"inline"` for one rank in this process, where `breakpoint()` works. Inline groups raise
            the same errors, with the exception itself as `cause`, and have no deadlines.
        timeout: time limit of a call in seconds, unless `@register` or the call sets one. This default is counted from
            the moment when any rank last made progress (`enginehouse.engines.progress`). The other limits are counted
            from the moment when the call was sent.
        start_timeout: seconds within which every worker's `__init__` must end.
        seed: base seed of the run, in `ProcessContext.seed`.
        device: `"cpu"` or `"cuda"`, in `ProcessContext.device`.
        threads: number of threads that numeric libraries use in each process (OMP_NUM_THREADS).

    Raises:
        PlacementError: the cluster does not provide the resources of the pool.
        WorkerError: a worker could not be built. No process is left behind.
    """

    def __init__(
        self,
        pool: ResourcePool | None,
        spec: WorkerSpec,
        *,
        name: str = "workers",
        launcher: str = "ray",
        timeout: float = 600.0,
        start_timeout: float = 300.0,
        seed: int = 0,
        device: Device = "cpu",
        threads: int = 1,
    ):
        reserve_names(spec)
        options = LaunchOptions(name, start_timeout, seed, device, threads, timeout)
        processes = launch(launcher, pool, {name: spec}, options)
        self._set(processes, name, timeout, owners=[])

    @classmethod
    def view(cls, processes: WorkerProcesses, role: str, timeout: float, owners: list[WorkerGroup]) -> WorkerGroup:
        """Make the group of one role in shared processes, and add it to `owners`. The processes end when the last group
        of `owners` is shut down."""
        group = cls.__new__(cls)
        group._set(processes, role, timeout, owners)
        return group

    def _set(self, processes: WorkerProcesses, role: str, timeout: float, owners: list[WorkerGroup]) -> None:
        self.name = role
        self._processes = processes
        self._timeout = timeout
        self._cls = processes.roles[role].cls
        self._specs = registered_methods(self._cls)
        self._modes: dict[str, Mode] = {}
        self._layout: DataLayout | None = None
        self._closed = False
        self._owners = owners
        owners.append(self)
        for method, spec in self._specs.items():
            invoke = functools.partial(self._invoke, method, spec, None, spec.timeout, spec.blocking, None)
            setattr(self, method, functools.update_wrapper(invoke, getattr(self._cls, method), updated=()))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._processes.places)

    @property
    def nodes(self) -> list[str]:
        """Node address of each rank."""
        return [place.node for place in self._processes.places]

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, on its node."""
        return [place.pid for place in self._processes.places]

    @property
    def meshes(self) -> list[Mesh | None]:
        """Mesh of each rank, as read after the workers' `__init__`, or by the last `refresh_meshes`."""
        return self._processes.meshes(self.name)

    @property
    def layout(self) -> DataLayout:
        """The layout of the data axis over the ranks. Raises `DispatchError` if the ranks' meshes are inconsistent."""
        if self._layout is None:
            self._layout = DataLayout.of(self.meshes, self.name)
        return self._layout

    @property
    def broken(self) -> str | None:
        """Reason why the group rejects calls; None if it is usable."""
        return f"{self.name} was shut down" if self._closed else self._processes.broken

    def refresh_meshes(self) -> list[Mesh | None]:
        """Read the workers' meshes again. Call this if the workers set their meshes after `__init__`."""
        self._layout = None
        return self._processes.meshes(self.name, refresh=True)

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        blocking: bool | None = None,
        patient: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a registered method with a deadline or a `blocking` that differs from its registration.

        Args:
            timeout: deadline in seconds.
            blocking: False returns a `Future`.
            patient: True if the deadline is counted from the moment when any rank last made progress. The default is
                True without a `timeout`, and else False.
            kwargs: keyword arguments of the method, except arguments of the names above.

        Raises:
            AttributeError: there is no such registered method.
            WorkerError: the call failed.
        """
        spec = self._specs.get(method)
        if spec is None:
            raise AttributeError(
                f"{self._cls.__name__} has no registered method {method!r}, only {sorted(self._specs)}"
            )
        timeout = spec.timeout if timeout is None else timeout
        blocking = spec.blocking if blocking is None else blocking
        return self._invoke(method, spec, None, timeout, blocking, patient, *args, **kwargs)

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method of the workers on every rank with the same arguments, and return one result per rank."""
        return self._invoke(method, _ALL, self._mode("execute_all", _ALL), None, True, None, *args, **kwargs)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> Future:
        return self._invoke(method, _ALL, self._mode("execute_all", _ALL), None, False, None, *args, **kwargs)

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method of the workers on rank 0."""
        return self._invoke(method, _ZERO, self._mode("execute_rank_zero", _ZERO), None, True, None, *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Future:
        return self._invoke(method, _ZERO, self._mode("execute_rank_zero", _ZERO), None, False, None, *args, **kwargs)

    def execute_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method of the workers on one rank.

        If the method is registered with `collect="distributed"`, a batch stays on the worker if it is the whole result,
        or the last item of a tuple.

        Raises:
            DispatchError: there is no such rank.
        """
        return self._invoke(method, _ALL, self._rank_mode(rank, method), None, True, None, *args, **kwargs)

    def execute_rank_async(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        return self._invoke(method, _ALL, self._rank_mode(rank, method), None, False, None, *args, **kwargs)

    def _rank_mode(self, rank: int, method: str) -> Mode:
        if not 0 <= rank < self.world_size:
            raise DispatchError(f"{self.name}.{method}: {self.name} has ranks 0 to {self.world_size - 1}, not {rank}")

        def dispatch(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[Call | None]:
            return [(args, kwargs) if called == rank else None for called in range(group.world_size)]

        spec = self._specs.get(method)
        if spec is not None and self._mode(method, spec).keeps_back:
            return Mode(dispatch, lambda group, outputs, ranks: wrap_shard(outputs[rank]), keeps_back=True)
        return Mode(dispatch, lambda group, outputs, ranks: outputs[rank], passes_on=True)

    def _mode(self, method: str, spec: CallSpec) -> Mode:
        mode = self._modes.get(method)
        if mode is None:
            mode = self._modes[method] = resolve_mode(spec)
        return mode

    def _invoke(
        self,
        method: str,
        spec: CallSpec,
        mode: Mode | None,
        timeout: float | None,
        blocking: bool,
        patient: bool | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._closed:
            raise GroupClosed(f"{self.name}.{method} cannot be called any more: it was shut down", "shut down")
        patient = timeout is None if patient is None else patient
        deadline = self._timeout if timeout is None else timeout
        if deadline <= 0:
            raise DispatchError(
                f"{self.name}.{method}: a deadline must be a positive number of seconds, not {deadline:g}"
            )
        mode = mode or self._mode(method, spec)
        if mode.awaits_futures:
            label, until = f"{self.name}.{method}", None if patient else time.monotonic() + deadline
            args = tuple(_await_argument(label, value, until, deadline) for value in args)
            kwargs = {name: _await_argument(label, value, until, deadline) for name, value in kwargs.items()}
            if until is not None:
                deadline = max(until - time.monotonic(), 0.001)
        calls = mode.dispatch(self, *args, **kwargs)
        _check_calls(calls, self, method)
        if spec.execute == "rank_zero":
            calls = [calls[0], *[None] * (len(calls) - 1)]
        called = [rank for rank, call in enumerate(calls) if call is not None]
        ranks = [rank for rank in mode.returning(self) if rank in called] or called if mode.returning else called
        lane: Lane = "urgent" if spec.urgent else "loop" if is_async(self._cls, method) else "main"

        dealt = calls.shards if isinstance(calls, Dealt) and mode.joins else None  # `calls` has the arguments

        def collect_outputs(outputs: list[Any]) -> Any:
            result = mode.collect(self, outputs, ranks)
            return result if dealt is None else restore_order(result, [outputs[rank] for rank in ranks], dealt)

        trace = CallTrace(self.name, method)
        try:
            pending = self._processes.submit(
                self.name, method, calls, frozenset(ranks), lane, deadline, mode.keeps_back, patient
            )
            if blocking:
                return collect_outputs(pending.wait())
        finally:
            if blocking:
                trace.end()
        single = ranks[0] if mode.passes_on and len(ranks) == 1 else None
        return Future(pending, collect_outputs, single, trace.end)

    def restart(self) -> None:
        """End the remaining processes, and start new processes with the same ranks, worker class and options.

        They start in the same places, or in others if a node has left. Workers are rebuilt and lose their state.
        Running calls fail with `WorkerDied`. Groups in the same processes restart with this group. A broken group is
        usable afterwards.

        Raises:
            GroupClosed: the group was shut down.
            PlacementError: a node has left, and the cluster provides no other place within the pool's timeout. The
                group is broken, and may be restarted again.
            WorkerError: a worker could not be built. The group is broken, and may be restarted again.
        """
        if self._closed:
            raise GroupClosed(f"{self.name} cannot be restarted: {self.broken}", str(self.broken))
        try:
            fresh = self._processes.restarted()
            for group in self._owners:
                group._processes = fresh
                group._layout = None
        finally:
            if all(group._closed for group in self._owners):  # another thread has shut them down since
                self._processes.shutdown(10.0)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Call the workers' `shutdown`, if they have one, and end their processes. A second call does nothing.

        Colocated groups share their processes, which end with the last of these groups.

        Args:
            timeout: seconds that the workers have to end before their processes are killed.
        """
        if self._closed:
            return
        self._closed = True
        if all(group._closed for group in self._owners):
            self._processes.shutdown(timeout)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Raise an `AttributeError` that names the remedy.

        Python calls this method only if the group lacks the attribute `name`. Registered methods are attributes that
        are set when the group is made, so `name` is not a registered method.
        """
        cls = self.__dict__.get("_cls")
        if cls is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if callable(getattr(cls, name, None)):
            raise AttributeError(
                f"{cls.__name__}.{name} is not registered: decorate it with @register, or call "
                f"group.execute_all({name!r}, ...)"
            )
        raise AttributeError(f"a group of {cls.__name__} has no method {name!r}. {nearest(name, self._specs)}")

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, {self._cls.__name__} x {self.world_size})"


def launch(
    launcher: str, pool: ResourcePool | None, roles: Mapping[str, WorkerSpec], options: LaunchOptions
) -> WorkerProcesses:
    """Start the processes of a group, with one object per role in each.

    Raises:
        ControllerError: there is no such launcher, or the pool does not fit the launcher.
        WorkerError: a worker could not be built.
    """
    if launcher == "inline":
        from enginehouse.controller.launchers.inline import InlineProcesses

        return InlineProcesses(pool, roles, options)
    if launcher != "ray":
        raise ControllerError(f"{options.name}: launcher must be 'ray' or 'inline', not {launcher!r}")
    if pool is None:
        raise ControllerError(f"{options.name}: the Ray launcher needs a ResourcePool")
    if options.device == "cuda" and not pool.gpus_per_process:
        raise ControllerError(
            f"{options.name}: device 'cuda' needs a pool with gpus_per_process, but pool {pool.name!r} has no GPUs"
        )
    from enginehouse.controller.launchers.ray import RayProcesses

    return RayProcesses.launch(pool, roles, options)


def reserve_names(spec: WorkerSpec) -> None:
    """Raise a `ControllerError` for a worker whose registered method would hide an attribute of the group."""
    if not isinstance(spec, WorkerSpec):
        name = spec.__name__ if isinstance(spec, type) else repr(spec)
        raise ControllerError(
            f"a group must be made from a WorkerSpec: write WorkerSpec({name}, ...) instead of {name}"
        )
    for method in registered_methods(spec.cls):
        if hasattr(WorkerGroup, method) or method == "name":
            raise ControllerError(
                f"{spec.cls.__name__}.{method} cannot be registered: worker groups have an attribute {method!r}"
                + ("; remove @register: the group's shutdown calls this method on each worker" * (method == "shutdown"))
            )


_ALL = CallSpec("one_to_all")
_ZERO = CallSpec("rank_zero")


def _await_argument(label: str, argument: Any, until: float | None, timeout: float) -> Any:
    """Return an argument; if it is a `Future`, wait for its result and return the result.

    Args:
        until: time of `time.monotonic()` at which the wait ends; None: no limit.
        timeout: the deadline in seconds, for the message.
    """
    if isinstance(argument, Balanced):
        return Balanced(_await_argument(label, argument.batch, until, timeout), argument.by)
    if not isinstance(argument, Future):
        return argument
    try:
        return argument.result(None if until is None else max(until - time.monotonic(), 0.0))
    except StillRunning as error:
        raise DispatchError(
            f"{label} was not sent: an argument is the result of a call that still ran when the deadline of "
            f"{timeout:g} s had passed"
        ) from error


def _check_calls(calls: Any, group: WorkerGroup, method: str) -> None:
    """Raise a `DispatchError` unless the dispatch function returned one (args, kwargs) or None for each rank."""
    if not isinstance(calls, (list, tuple)) or len(calls) != group.world_size or not any(calls):
        raise DispatchError(
            f"{group.name}.{method}: its dispatch function must return a list with one (args, kwargs) for each of "
            f"{group.world_size} ranks (None for a rank that is not called), not {_shape(calls)}"
        )
    for rank, call in enumerate(calls):
        if call is not None and not _is_call(call):
            raise DispatchError(f"{group.name}.{method}: rank {rank} got {_shape(call)} instead of (args, kwargs)")


def _is_call(call: Any) -> bool:
    return isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], dict)


def _shape(value: Any) -> str:
    with contextlib.suppress(TypeError):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__
