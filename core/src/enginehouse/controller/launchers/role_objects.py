"""The objects in one process, one per role."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext

log = logging.getLogger(__name__)

current_role: contextvars.ContextVar[str] = contextvars.ContextVar("enginehouse_role", default="")
"""Role whose method is running, for log lines."""


@contextlib.contextmanager
def act_as(role: str) -> Iterator[None]:
    """Make a role the current role, also for coroutines that are submitted to the event loop inside the context."""
    token = current_role.set(role)
    try:
        yield
    finally:
        current_role.reset(token)


class RoleObjects:
    """Builds the objects of one process, holds them by role, and shuts them down."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self._objects: dict[str, Any] = {}
        self._closed = False

    def __getitem__(self, role: str) -> Any:
        if self._closed:  # the call was sent before the shutdown and arrived after it
            raise CancelledError(f"{role} was shut down")
        return self._objects[role]

    def build(self, role: str, spec: WorkerSpec, context: ProcessContext) -> None:
        """Build the object of a role. Its `context` is set before its `__init__` runs."""
        with act_as(role):
            worker = spec.cls.__new__(spec.cls, *spec.args, **spec.kwargs)
            with contextlib.suppress(AttributeError):  # a class with slots may have no `context`
                worker.context = context
            worker.__init__(*spec.args, **spec.kwargs)
        self._objects[role] = worker

    def mesh(self, role: str) -> Mesh | None:
        """Return the mesh of a role's object; None if it has none."""
        mesh = getattr(self._objects.get(role), "mesh", None)
        return mesh if isinstance(mesh, Mesh) else None

    def close(self, timeout: float) -> None:
        """Call the objects' `shutdown` in reverse order, log their errors, and end the loop."""
        for role, worker in reversed(self._objects.items()):
            if not callable(getattr(worker, "shutdown", None)):
                continue
            try:
                with act_as(role):
                    result = worker.shutdown()
                    if inspect.iscoroutine(result):
                        self.loop.submit(result).result(timeout)
            except Exception:
                log.warning("%s: shutdown failed", role, exc_info=True)
        self._closed = True
        self._objects.clear()
        self.loop.stop()
