"""Restarts processes, each of which may die without the others. A process that does no work between several restarts is
left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from enginehouse.controller.group import WorkerGroup
from enginehouse.controller.members import Member
from enginehouse.controller.pool import ResourcePool
from enginehouse.errors import first_line

log = logging.getLogger(__name__)

State = Literal["serving", "returned", "lost", "out"]
"""State of a process, in this order: it serves; it was restarted and waits for something, such as weights; it is lost,
and may be restarting; it is left out for good."""
RESTARTS = 3
"""Maximum number of restarts of a process without work in between."""
SHUTDOWN_SECONDS = 10.0
RESTART_END_SECONDS = 3.0
"""Time in seconds that a shutdown waits for a running restart before it shuts the pool down."""


@dataclass(slots=True, eq=False)
class Seat:
    """One of several supervised processes. The seat stays the same when its process is restarted.

    Attributes:
        incarnation: number of the current process, from 0.
        restarts: number of restarts since the process last did some work.
    """

    number: int
    group: WorkerGroup
    rank: int = 0
    incarnation: int = 0
    state: State = "serving"
    restarts: int = 0
    death: str = ""
    restarting: threading.Thread | None = None

    @property
    def comes_back(self) -> bool:
        """True if the process is being restarted, or its restart has just ended."""
        return self.state in ("lost", "returned") and self.restarting is not None and self.restarting.is_alive()

    @property
    def is_started(self) -> bool:
        return self.state == "lost" and self.comes_back

    @property
    def member(self) -> Member:
        return Member(self.number, self.incarnation, self.group)


S = TypeVar("S", bound=Seat)


class Supervisor(Generic[S]):
    """Restarts lost processes, each in a separate thread. Usable from any thread.

    Args:
        restarts: maximum number of restarts of a process without work in between. Then the process is left out.
        idle: words for the missing work in the message "was started again 3 times without ... in between".
        begin: function that is called once a process runs again. It sets the state, and returns text for the log line.
        changed: function that is called once a process is back, or is left out.

    Attributes:
        lock: lock that is held while a seat is changed.
        closing: set once no process is restarted any more.
    """

    def __init__(
        self,
        seats: Sequence[S],
        restarts: int,
        idle: str,
        begin: Callable[[S], str],
        changed: Callable[[S], object],
    ):
        self.lock, self.closing = threading.RLock(), threading.Event()
        self._seats, self._most_restarts, self._idle = seats, restarts, idle
        self._begin, self._changed = begin, changed
        self._restarts = 0

    def lose(self, seat: S, member: Member, death: str, shown: str = "") -> bool:
        """Mark a process as lost because of `death`, and restart it in the background. The log shows `shown` instead of
        `death` if `shown` is not empty. Returns False, and does nothing, if the process is marked as lost already, or a
        shutdown has begun."""
        with self.lock:
            if seat.incarnation != member.incarnation or self.closing.is_set():
                return False
            seat.incarnation += 1
            seat.death, seat.state = death, "lost"
            log.warning("%s is lost and is started again: %s", seat.group.name, shown or death)
            seat.restarting = threading.Thread(
                target=self._restart, args=(seat,), name=f"{seat.group.name}-restart", daemon=True
            )
            seat.restarting.start()
            return True

    def _restart(self, seat: S) -> None:
        while not self.closing.is_set():
            if seat.restarts >= self._most_restarts:
                log.error("%s is left out from now on: it %s", seat.group.name, self.vain_restarts(seat))
                seat.state = "out"
                self._changed(seat)
                return
            seat.restarts += 1
            with self.lock:
                self._restarts += 1
            begun = time.perf_counter()
            try:
                seat.group.restart()
                if self.closing.is_set():
                    return
                beside = self._begin(seat)
            except BaseException as error:  # even a `sys.exit()`, because work waits for this process
                if not self.closing.is_set():
                    seat.death = f"its restart failed: {first_line(error)}"
                    log.warning("%s: %s", seat.group.name, seat.death)
                continue
            log.info("%s is back after %.1f s%s", seat.group.name, time.perf_counter() - begun, beside)
            self._changed(seat)
            return

    def vain_restarts(self, seat: S) -> str:
        """Describe the restarts of a process that is left out."""
        return f"was started again {seat.restarts} times without {self._idle} in between; at last: {seat.death}"

    def take_restarts(self) -> int:
        """Return the number of restarts since the last call of this method."""
        with self.lock:
            restarts, self._restarts = self._restarts, 0
        return restarts

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS, pool: ResourcePool | None = None) -> None:
        """End all processes at the same time. A second call does nothing.

        Args:
            timeout: seconds that each process has to end.
            pool: pool to shut down. A restart that still runs then fails.
        """
        self.closing.set()
        with self.lock:
            seats = list(self._seats)
        try:
            run_at_once([partial(seat.group.shutdown, timeout) for seat in seats])
            _wait_for_restarts(seats)
        finally:
            if pool is not None:
                pool.shutdown()
        _wait_for_restarts(seats)


def _wait_for_restarts(seats: Sequence[Seat]) -> None:
    until = time.monotonic() + RESTART_END_SECONDS
    for seat in seats:
        if seat.restarting is not None:
            seat.restarting.join(max(until - time.monotonic(), 0.0))


def run_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls in separate threads and wait for all. Then raise the first error, or return the results. It uses no
    executor, because an executor's threads would delay the end of the program."""
    if len(calls) == 1:
        return [calls[0]()]
    results: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results
