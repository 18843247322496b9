"""The result of a non-blocking call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.ray_access import LOOK_SECONDS

if TYPE_CHECKING:
    from enginehouse.controller.launchers.interface import Pending

T = TypeVar("T")


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

    @property
    def deadline(self) -> float:
        """When `result` raises `WorkerTimeout` if the call has not ended, by `time.monotonic`."""
        pending = self._pending
        return float("-inf") if pending is None else pending.deadline

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Have `callback(self)` called once: when the call has ended on every rank, or failed on one; now, if it has.

        Maybe in another thread, which it must not hold up. That the deadline passed is not told.
        """
        pending = self._pending
        if self._settled or pending is None:
            callback(self)
        else:
            pending.add_done_callback(lambda: callback(self))

    def look(self) -> None:
        """To be called every `LOOK_SECONDS` by who waits for `add_done_callback`.

        Raises:
            ClusterLost: Ray is about to end.
        """
        if (pending := self._pending) is not None:
            pending.look()

    def hurry(self) -> None:
        """To be called by who was interrupted while it waited for `add_done_callback`."""
        if (pending := self._pending) is not None:
            pending.hurry()

    @property
    def calls(self) -> tuple[Future, ...]:
        """Itself: the calls that are waited for, as of `Gathered`."""
        return (self,)

    def done(self) -> bool:
        """Whether every rank has ended, or the deadline passed: `result` returns or raises at once."""
        pending = self._pending
        return self._settled or pending is None or pending.done()

    def reference(self) -> Any:
        """What stands for the result in another call's arguments, where it is one rank's output as it is; else None."""
        pending = self._pending  # none once the call has failed
        return None if self._rank is None or pending is None else pending.reference(self._rank)


class Ends(Generic[T]):
    """The ends of calls in the order in which they come, and what else is put among them. A call costs no thread.

    Calls are added, and ends taken, by one thread.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Future | T] = queue.SimpleQueue()
        self._waited: set[Future] = set()

    def add(self, call: Future) -> None:
        """Wait for a call too."""
        self._waited.add(call)
        call.add_done_callback(self._events.put)

    def put(self, event: T) -> None:
        """Something else has happened. From any thread."""
        self._events.put(event)

    def next(self, timeout: float | None = None) -> Future | T:
        """The next call whose `result` returns or raises, each once; or the next event.

        Raises:
            StillRunning: nothing came in `timeout` seconds.
            ClusterLost: Ray is about to end.
        """
        try:
            return self._next(float("inf") if timeout is None else time.monotonic() + timeout)
        except Exception:
            raise
        except BaseException:
            for call in self._waited:
                call.hurry()
            raise

    def _next(self, until: float) -> Future | T:
        while True:
            late = min(self._waited, key=lambda call: call.deadline, default=None)
            least = min(until, float("inf") if late is None else late.deadline)
            with suppress(queue.Empty):
                event = self._events.get(timeout=min(max(least - time.monotonic(), 0.0), LOOK_SECONDS))
                if not isinstance(event, Future):
                    return event
                if event in self._waited:  # else its deadline had passed before
                    self._waited.discard(event)
                    return event
                continue
            if late is not None:
                if late.deadline <= time.monotonic():
                    self._waited.discard(late)
                    return late
                late.look()
            if time.monotonic() >= until:
                raise StillRunning("the calls still run")


def as_they_end(calls: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """Each of these calls, once its `result` returns or raises.

    Raises:
        StillRunning: `timeout` seconds have passed since the first was asked for.
        ClusterLost: Ray is about to end.
    """
    until = None if timeout is None else time.monotonic() + timeout
    ends: Ends[Future] = Ends()
    left = 0
    for call in dict.fromkeys(calls):
        ends.add(call)
        left += 1
    for _ in range(left):
        yield ends.next(None if until is None else max(until - time.monotonic(), 0.0))
