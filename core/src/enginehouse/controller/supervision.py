"""Processes each of which may die alone: seen, named, started again so many times in vain, and at last left out."""

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
"""Of a process: works; was started again and lacks something; is gone, perhaps being started; stays gone."""
RESTARTS = 3
"""How often a process is started again without having done anything in between."""
SHUTDOWN_SECONDS = 10.0
RESTART_END_SECONDS = 3.0
"""How long a restart under way is waited for at the end; then its place is taken away from it."""


@dataclass(slots=True, eq=False)
class Seat:
    """One of several processes, whichever incarnation of it lives.

    Attributes:
        number: which it is.
        group: the group it is in.
        rank: its rank there.
        incarnation: counts its processes, from 0.
        state: what it is good for.
        restarts: begun since it last did something.
        death: why it went, the last time.
        restarting: starts it again, or did.
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
        """True if it is being started again, or was just now."""
        return self.state in ("lost", "returned") and self.restarting is not None and self.restarting.is_alive()

    @property
    def is_started(self) -> bool:
        """True if it is being started again."""
        return self.state == "lost" and self.comes_back

    @property
    def member(self) -> Member:
        """Its process of this moment."""
        return Member(self.number, self.incarnation, self.group)


S = TypeVar("S", bound=Seat)


class Supervisor(Generic[S]):
    """Starts processes again that are lost, each in a thread of its own. From any thread.

    Args:
        seats: the processes; may grow.
        restarts: how often a process is started again without having done anything in between; then it is out.
        idle: what it has not done then, for messages.
        begin: called once a process is there again; sets its state, and returns what the log says beside that.
        changed: called once a process is back, or out.

    Attributes:
        lock: held by who changes a seat.
        closing: set once no process is started again any more.
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
        """Note that an incarnation of a process is gone, and start the process again in the background.

        Args:
            death: why, in a line; `shown` is what the log says instead.

        Returns:
            False if that was known, or all end.
        """
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
            except BaseException as error:  # whatever it is, even a `sys.exit()`: work waits for this process
                if not self.closing.is_set():
                    seat.death = f"its restart failed: {first_line(error)}"
                    log.warning("%s: %s", seat.group.name, seat.death)
                continue
            log.info("%s is back after %.1f s%s", seat.group.name, time.perf_counter() - begun, beside)
            self._changed(seat)
            return

    def vain_restarts(self, seat: S) -> str:
        """Say of a process that is out what was tried."""
        return f"was started again {seat.restarts} times without {self._idle} in between; at last: {seat.death}"

    def take_restarts(self) -> int:
        """Return how many restarts were begun since this was asked for last."""
        with self.lock:
            restarts, self._restarts = self._restarts, 0
        return restarts

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS, pool: ResourcePool | None = None) -> None:
        """End every process, at once. May be called again.

        Args:
            timeout: seconds that each gets.
            pool: its places are given back; a restart under way, which may still call Ray, fails without one.
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
    """Do things in threads of their own and wait for all; then raise the first error, or return what each returned.

    Not with an executor: its threads hold up the end of the program.
    """
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
