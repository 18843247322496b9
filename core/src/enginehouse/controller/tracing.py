"""A light trace of worker-group calls, for timelines. Listeners in this process are called at the end of each call.

    remove = add_listener(lambda group, method, call, start_ns, end_ns: ...)

`call` is the number of the call on this controller, and times are `time.monotonic_ns()`. A call ends when its results
are collected or its error is raised. A listener runs in the thread that collects the results, and must be quick. A
listener that raises is removed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from enginehouse.plugin import plugins

log = logging.getLogger(__name__)

Listener = Callable[[str, str, int, int, int], None]

_listeners: list[Listener] = []
_numbers = itertools.count()


def add_listener(listener: Listener) -> Callable[[], None]:
    """Call `listener(group, method, call, start_ns, end_ns)` after each call. Returns a function to remove it."""
    _listeners.append(listener)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return remove


class CallTrace:
    """One call of a worker group. When the call starts, observers get the event `call_dispatched`. When the call ends,
    the listeners are called, and observers get the event `call_collected`."""

    __slots__ = ("_ended", "call", "group", "method", "start_ns")

    def __init__(self, group: str, method: str):
        self.group = group
        self.method = method
        self.call = next(_numbers)
        self._ended = False
        self.start_ns = time.monotonic_ns()
        manager = plugins()
        if manager.observes("call_dispatched"):
            manager.observe("call_dispatched", group=group, method=method, call=self.call)

    def end(self) -> None:
        """Record the end of the call, with results or an error. Only the first call of this method has an effect."""
        if self._ended:
            return
        self._ended = True
        end_ns = time.monotonic_ns()
        for listener in tuple(_listeners):
            try:
                listener(self.group, self.method, self.call, self.start_ns, end_ns)
            except Exception as error:
                _listeners.remove(listener)
                message = "a listener of worker-group calls failed and is not called again: %s: %s"
                disk = isinstance(error, OSError)  # for example of the timeline, where a traceback adds nothing
                log.warning(message, type(error).__name__, error, exc_info=not disk)
        manager = plugins()
        if manager.observes("call_collected"):
            seconds = (end_ns - self.start_ns) / 1e9
            manager.observe("call_collected", group=self.group, method=self.method, call=self.call, seconds=seconds)
