"""The result of a non-blocking call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import ClusterLost

if TYPE_CHECKING:
    from enginehouse.controller.launchers.interface import Pending


GLANCE_SECONDS = 0.1
"""How often the others are looked at by who waits for one of several calls."""


class StillRunning(TimeoutError):
    """The time given to `Future.result` passed; the call's own deadline has not."""


class Future:
    """A call that was sent and not waited for. Made by a group; give it to another group's call, or ask for its result.

    The call's deadline counts from when it was sent, whether or not anybody waits.
    """

    def __init__(
        self,
        pending: Pending,
        finish: Callable[[list[Any]], Any],
        rank: int | None = None,
        ended: Callable[[], None] = lambda: None,
    ):
        self._pending: Pending | None = pending
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._rank = rank
        self._ended = ended
        self._lock = threading.Lock()
        self._settled = False
        self._value: Any = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its collected result; the same each time.

        Args:
            timeout: seconds to wait, if less than what is left of the call's deadline.

        Raises:
            StillRunning: `timeout` passed; the call goes on and may be asked again. A `TimeoutError`.
            ClusterLost: Ray is about to end; the worker may live, and be asked again.
            WorkerError: the call failed, or its deadline passed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise StillRunning(f"the call still runs after {timeout:g} s")  # another thread waits for it
        try:
            if not self._settled:
                self._settle(None if until is None else max(until - time.monotonic(), 0.0))
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self._lock.release()

    def _settle(self, timeout: float | None) -> None:
        assert self._pending is not None
        assert self._finish is not None
        try:
            self._value = self._finish(self._pending.wait(timeout))
        except (StillRunning, ClusterLost):
            raise
        except Exception as error:
            self._error = error
        self._settled = True
        self._ended()
        self._finish = None  # what a settled future need not hold, it lets go
        if self._rank is None or self._error is not None:
            self._pending = None

    def done(self) -> bool:
        """Whether every rank has ended, or the deadline passed: `result` returns or raises at once."""
        pending = self._pending
        return self._settled or pending is None or pending.done()

    def reference(self) -> Any:
        """What stands for the result in another call's arguments, where it is one rank's output as it is; else None."""
        pending = self._pending  # none once the call has failed
        return None if self._rank is None or pending is None else pending.reference(self._rank)
