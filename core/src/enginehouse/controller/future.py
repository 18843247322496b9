"""The result of a non-blocking call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.controller.launchers.interface import Pending


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
        self._pending = pending
        self._finish = finish
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
            WorkerError: the call failed, or its deadline passed.
        """
        with self._lock:
            if not self._settled:
                try:
                    self._value = self._finish(self._pending.wait(timeout))
                except StillRunning:
                    raise
                except Exception as error:
                    self._error = error
                self._settled = True
                self._ended()
            if self._error is not None:
                raise self._error
            return self._value

    def done(self) -> bool:
        """Whether every rank has ended, or the deadline passed: `result` returns or raises at once."""
        return self._settled or self._pending.done()

    def reference(self) -> Any:
        """What stands for the result in another call's arguments, where it is one rank's output as it is; else None."""
        return None if self._rank is None or self._error is not None else self._pending.reference(self._rank)
