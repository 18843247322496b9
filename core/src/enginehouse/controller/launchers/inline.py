"""A group in this process, for a debugger. It has one rank and behaves like a group on Ray, but has no deadlines.

An exception of a worker becomes a `RemoteError`, as with Ray. The cause of the `RemoteError` is the exception itself
with its traceback, so that a debugger finds the place of the error.
"""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import Any

from enginehouse.controller.dispatch import Call, is_distributed, refuse_wrapper
from enginehouse.controller.errors import ControllerError, GroupClosed, WorkerError
from enginehouse.controller.future import Future, StillRunning
from enginehouse.controller.launchers import rendezvous
from enginehouse.controller.launchers.failure import CallSite, cut_off_error, wrap_error
from enginehouse.controller.launchers.interface import Lane, LaunchOptions, WorkerPlace
from enginehouse.controller.launchers.role_objects import RoleObjects, act_as
from enginehouse.controller.pool import ResourcePool
from enginehouse.controller.shards import Shard, get_last, keep_back, replace_last
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext
from enginehouse.errors import first_line


class InlineCall:
    """A `PendingCall` in this process. A sync call has already ended, and an async call is a future of the event loop.

    Args:
        keep: True if the result is collected.
        origin: `Shard.origin` for the shard that the call returns instead of a batch; None: the call returns the batch.
        make_error: function that makes the error to raise for an exception.
    """

    deadline = float("inf")

    def __init__(
        self,
        result: futures.Future[Any],
        keep: bool,
        origin: str | None,
        make_error: Callable[[BaseException], WorkerError],
    ):
        self._result = result
        self._keep = keep
        self._origin = origin
        self._make_error = make_error

    def wait(self, limit: float | None = None) -> list[Any]:
        futures.wait([self._result], timeout=limit)
        if not self._result.done():
            raise StillRunning(f"the call still runs after {limit} s")
        error = futures.CancelledError() if self._result.cancelled() else self._result.exception()
        if error is not None:  # also for a SystemExit, which would not reach a caller that waits on an event loop
            raise self._make_error(error)
        value = self._result.result()
        if self._keep and self._origin is not None:
            facts, batch = keep_back(value)
            value = facts if batch is None else replace_last(facts, Shard(batch, get_last(facts), self._origin))
        return [value if self._keep else None]

    def done(self) -> bool:
        return self._result.done()

    def overdue(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[bool], object]) -> None:
        self._result.add_done_callback(lambda result: callback(not result.cancelled() and not result.exception()))

    def look(self) -> None:
        """Do nothing, because the call runs in this process and not on Ray."""

    def hurry(self) -> None:
        """Do nothing, because there are no other processes to end."""

    def reference(self, rank: int) -> Any:
        return None


class InlineProcesses:
    """The only rank of a group, or of several colocated groups, in this process.

    Raises:
        ControllerError: the pool has more than one process.
        WorkerError: an object could not be built.
    """

    def __init__(self, pool: ResourcePool | None, roles: Mapping[str, WorkerSpec], options: LaunchOptions):
        if pool is not None and pool.world_size != 1:
            raise ControllerError(
                f"{options.name}: the inline launcher runs one process, but pool {pool.name!r} has {pool.world_size}; "
                'use launcher="ray" or a pool of [1]'
            )
        self.roles = dict(roles)
        self.options = options
        self.places = [WorkerPlace(0, 0, 1, socket.gethostname(), os.getpid())]
        self._objects = RoleObjects()
        self._broken: str | None = None
        self._ended = False
        self._variables = _Variables()
        if any(spec.distributed for spec in self.roles.values()):
            self._store, port = rendezvous.open_store("127.0.0.1", options.start_timeout)
            self._variables.set(rendezvous.rank_variables(0, 1, 0, 1, ("127.0.0.1", port)))
        try:
            for role, spec in self.roles.items():
                context = ProcessContext(
                    role=role, node=self.places[0].node, device=options.device, seed=options.seed,
                    labels={"roles": tuple(self.roles)},
                )  # fmt: skip
                try:
                    self._objects.build(role, spec, context)
                except Exception as error:
                    raise self._error(role, "__init__", error) from error
        except BaseException:
            self.shutdown()
            raise

    @property
    def broken(self) -> str | None:
        """Reason why no further call is possible. Only a shutdown or a failed restart breaks an inline group."""
        return self._broken

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
    ) -> InlineCall:
        """Run a method to its end. Only an async method whose lane is not the main lane is started without waiting."""
        if self._broken is not None:
            raise GroupClosed(f"{role}.{method} cannot be called any more: {self._broken}", self._broken)
        assert calls[0] is not None
        args = tuple(map(_resolve, calls[0][0]))
        kwargs = {name: _resolve(value) for name, value in calls[0][1].items()}
        call: futures.Future[Any] = futures.Future()
        with act_as(role):
            try:
                result = getattr(self._objects[role], method)(*args, **kwargs)
            except Exception as error:
                call.set_exception(error)
            else:
                if not inspect.iscoroutine(result):
                    call.set_result(result)
                else:
                    call = self._objects.loop.submit(result)
                    if lane == "main":
                        futures.wait([call])
        return InlineCall(
            call, 0 in keep, f"{role}, {method!r}" if keeps_back else None, partial(self._error, role, method)
        )

    def meshes(self, role: str, refresh: bool = False) -> list[Mesh | None]:
        return [self._objects.mesh(role)]

    def shutdown(self, timeout: float = 10.0) -> None:
        if not self._ended:
            self._ended = True
            self._broken = f"{self.options.name} was shut down"
            self._close(timeout)

    def restarted(self) -> InlineProcesses:
        if self._ended:
            why = str(self._broken)
            raise GroupClosed(f"{self.options.name} cannot be restarted: {why}", why)
        self._broken = f"{self.options.name} is being restarted"
        try:
            self._close(10.0)
            fresh = InlineProcesses(None, self.roles, self.options)
        except BaseException as error:
            self._broken = f"its restart failed: {first_line(error)}"
            raise
        self._ended = True
        self._broken = f"{self.options.name} was restarted"
        return fresh

    def _error(self, role: str, method: str, error: BaseException) -> WorkerError:
        site = CallSite(role, 0, self.places[0].node, self.places[0].pid, method)
        if isinstance(error, futures.CancelledError) and self._broken is not None:
            return cut_off_error(self._broken, site)
        return wrap_error(error, site)

    def _close(self, timeout: float) -> None:
        self._objects.close(timeout)
        self._variables.restore()


class _Variables:
    """The environment variables of inline groups, restored after the end of the last group that set them."""

    _lock = threading.Lock()
    _users = 0
    _before: dict[str, str | None] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        self._using = False

    def set(self, variables: Mapping[str, str]) -> None:
        kind = type(self)
        with kind._lock:
            for name in variables:
                kind._before.setdefault(name, os.environ.get(name))
            os.environ.update(variables)
            kind._users += 1
            self._using = True

    def restore(self) -> None:
        kind = type(self)
        with kind._lock:
            if not self._using:
                return
            self._using = False
            kind._users -= 1
            if kind._users:
                return
            for name, value in kind._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            kind._before.clear()


def _resolve(argument: Any) -> Any:
    value = argument.result() if isinstance(argument, Future) else argument
    refuse_wrapper(value, "this call")
    return value.fetch() if is_distributed(value) else value
