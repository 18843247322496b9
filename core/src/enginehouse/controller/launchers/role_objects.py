"""The objects that live in one process, one for each role, and how their methods are run."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Coroutine
from typing import Any

from enginehouse.controller.launchers.event_loop import EventLoop
from enginehouse.controller.worker import WorkerSpec
from enginehouse.engines.mesh import Mesh
from enginehouse.engines.model import ProcessContext

log = logging.getLogger(__name__)

current_role: contextvars.ContextVar[str] = contextvars.ContextVar("enginehouse_role", default="")
"""The role whose method is running; log lines carry it."""


class RoleObjects:
    """The objects of one process.

    Attributes:
        loop: where async methods run.
    """

    def __init__(self) -> None:
        self.loop = EventLoop()
        self._objects: dict[str, Any] = {}

    def build(self, role: str, spec: WorkerSpec, context: ProcessContext) -> None:
        """Build the object of a role: its `context` is set before its `__init__` runs."""
        token = current_role.set(role)
        try:
            worker = spec.cls.__new__(spec.cls, *spec.args, **spec.kwargs)
            with contextlib.suppress(AttributeError):  # a class with slots that does not want one
                worker.context = context
            worker.__init__(*spec.args, **spec.kwargs)
        finally:
            current_role.reset(token)
        self._objects[role] = worker

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method on this thread; one that turns out to return a coroutine ends on the event loop."""
        token = current_role.set(role)
        try:
            result = getattr(self._objects[role], method)(*args, **kwargs)
            return self.loop.submit(self._under(role, result)).result() if inspect.iscoroutine(result) else result
        finally:
            current_role.reset(token)

    async def call_async(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an async method on the event loop."""
        current_role.set(role)
        return await getattr(self._objects[role], method)(*args, **kwargs)

    def mesh(self, role: str) -> Mesh | None:
        """The mesh a role's object has, if it is one."""
        mesh = getattr(self._objects.get(role), "mesh", None)
        return mesh if isinstance(mesh, Mesh) else None

    def close(self, timeout: float) -> None:
        """Call each object's `shutdown`, if it has one, last built first; log what they raise. Then end the loop."""
        for role, worker in reversed(self._objects.items()):
            if not callable(getattr(worker, "shutdown", None)):
                continue
            try:
                result = worker.shutdown()
                if inspect.iscoroutine(result):
                    self.loop.submit(self._under(role, result)).result(timeout)
            except Exception:
                log.warning("%s: shutdown failed", role, exc_info=True)
        self._objects.clear()
        self.loop.stop()

    async def _under(self, role: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        current_role.set(role)
        return await coroutine
