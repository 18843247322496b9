"""The result of a non-blocking call."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from enginehouse.controller.errors import ClusterLost
from enginehouse.controller.ray_access import LOOK_SECONDS

if TYPE_CHECKING:
    from enginehouse.controller.launchers.interface import PendingCall


class StillRunning(TimeoutError):
    """The timeout of `Future.result` passed, but the call's own deadline did not."""


class Future:
    """A running call of a group. Pass it as an argument to another group's call, or call `result`.

    A time limit given for the call is counted from the moment when the call was sent. The group's default limit is
    counted from the moment when any rank last made progress.
    """

    def __init__(
        self,
        pending: PendingCall,
        finish: Callable[[list[Any]], Any],
        rank: int | None = None,
        ended: Callable[[], None] = lambda: None,
    ):
        self._pending: PendingCall | None = pending
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._rank = rank
        self._ended = ended
        self._lock = threading.Lock()
        self._settled = False
        self._value: Any = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its collected result. Later calls return the same result.

        Args:
            timeout: seconds to wait, if shorter than the time to the call's deadline.

        Raises:
            StillRunning: `timeout` passed. The call continues, and `result` may be called again. This error is a
                `TimeoutError`.
            ClusterLost: Ray is about to end. The worker may still run, and `result` may be called again.
            WorkerError: the call failed, or its deadline passed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise StillRunning(f"the call still runs after {timeout:g} s")  # another thread holds the lock and waits
        try:
            if not self._settled:
                self._settle(None if until is None else max(until - time.monotonic(), 0.0))
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self._lock.release()

    def __await__(self) -> Generator[Any, None, Any]:
        """Await the result on an event loop, without a thread. Raises the errors of `result`."""
        return self._await_result().__await__()

    async def _await_result(self) -> Any:
        pending = self._pending
        if self._settled or pending is None:
            return self.result()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()

        def settle(well: bool) -> None:
            if not ended.done():
                ended.set_result(well)

        def tell(well: bool) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(settle, well)

        pending.add_done_callback(tell)
        while not ended.done():
            seconds = max(pending.deadline - time.monotonic(), 0.0)
            await asyncio.wait([ended], timeout=min(seconds, LOOK_SECONDS))
            if not ended.done():
                pending.look()
                # `overdue` may take seconds
                if pending.deadline <= time.monotonic() and await loop.run_in_executor(None, pending.overdue):
                    break
        if ended.done() and ended.result():
            return self.result()
        # `result` may take seconds to find the cause of a failure
        return await loop.run_in_executor(None, self.result)

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
        self._finish = None  # frees the arguments that it holds
        if self._rank is None or self._error is not None:
            self._pending = None

    @property
    def deadline(self) -> float:
        """Time of `time.monotonic` after which `result` raises `WorkerTimeout` if the call is `overdue`."""
        pending = self._pending
        return float("-inf") if pending is None else pending.deadline

    def overdue(self) -> bool:
        """Return True if the deadline has passed, so that `result` raises `WorkerTimeout` unless the call has ended.

        After the deadline, this check may take seconds. It postpones the deadline if a rank made progress and the call
        has the group's default limit.
        """
        pending = self._pending
        return pending is None or pending.overdue()

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(self)` once the call has ended on every rank, or failed on one rank. If that has happened
        already, the callback is called at once.

        The callback may run in another thread, and must not block that thread. It is not called when the deadline
        passes.
        """
        pending = self._pending
        if self._settled or pending is None:
            callback(self)
        else:
            pending.add_done_callback(lambda well: callback(self))

    def look(self) -> None:
        """Check that Ray still runs. Call it every `LOOK_SECONDS` while you wait for `add_done_callback`. Raises
        `ClusterLost` if Ray is about to end."""
        if (pending := self._pending) is not None:
            pending.look()

    def hurry(self) -> None:
        """Tell the call that a wait for the callback of `add_done_callback` was interrupted."""
        if (pending := self._pending) is not None:
            pending.hurry()

    @property
    def calls(self) -> tuple[Future, ...]:
        """This future in a tuple. `Gathered.calls` has several futures."""
        return (self,)

    def done(self) -> bool:
        """Return True if `result` returns or raises at once, because every rank has ended or the call is overdue."""
        pending = self._pending
        return self._settled or pending is None or pending.done()

    def reference(self) -> Any:
        """Return a placeholder that stands for the result in the arguments of other calls. Return None if the result is
        not the output of a single rank."""
        pending = self._pending  # None after a failed call
        return None if self._rank is None or pending is None else pending.reference(self._rank)


def iterate_ended(calls: Iterable[Future], timeout: float | None = None) -> Iterator[Future]:
    """Yield each of these calls once its `result` returns or raises. The wait uses no thread per call.

    Raises:
        StillRunning: `timeout` seconds have passed since the first item was requested.
        ClusterLost: Ray is about to end.
    """
    until = float("inf") if timeout is None else time.monotonic() + timeout
    ends: queue.SimpleQueue[Future] = queue.SimpleQueue()
    waited = dict.fromkeys(calls)
    for call in waited:
        call.add_done_callback(ends.put)
    while waited:
        try:
            call = _next_end(ends, waited, until)
        except Exception:
            raise
        except BaseException:
            for call in waited:
                call.hurry()
            raise
        del waited[call]
        yield call


def _next_end(ends: queue.SimpleQueue[Future], waited: Mapping[Future, None], until: float) -> Future:
    while True:
        late = min(waited, key=lambda call: call.deadline)
        seconds = min(until, late.deadline) - time.monotonic()
        with suppress(queue.Empty):
            call = ends.get(timeout=min(max(seconds, 0.0), LOOK_SECONDS))
            if call in waited:  # else it was overdue before
                return call
            continue
        if late.deadline <= time.monotonic() and late.overdue():
            return late
        late.look()
        if time.monotonic() >= until:
            raise StillRunning("the calls still run")
