"""Guards calls to Ray: rejects them once Ray shuts down, and limits the time of calls that stop or free something.

Ray's C++ code ends this program if the program calls Ray after Ray's shutdown, or once Ray's control service (GCS) has
been dead for a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

import psutil

from enginehouse.controller.errors import ClusterLost

log = logging.getLogger(__name__)

ENDING_SECONDS = 5.0
"""Time limit in seconds of a call that stops processes or frees resources."""
LEAVING_SECONDS = 3.0
"""Time in seconds for threads to return from calls to Ray before its shutdown. They check every `LOOK_SECONDS`."""
LOOK_SECONDS = 1.0
"""Interval at which a thread that waits for Ray checks that Ray still runs."""


class RayAccess:
    """A context around calls to Ray. Entering it raises once Ray is shut down or its control service has died.

    Attributes:
        abandoned: True if Ray's processes were killed without a shutdown of Ray in this process. The program should
            then not end through Ray's own exit handlers.
    """

    def __init__(self) -> None:
        self.lost = self.abandoned = False
        self._hung: list[threading.Thread] = []
        self._inside = 0
        self._closed = False
        self._left = threading.Condition()
        self._control: psutil.Process | None = None
        self._next_look = 0.0

    @property
    def stuck(self) -> bool:
        """True while a call that `end` made has not returned. `end` then makes no further calls."""
        return any(thread.is_alive() for thread in self._hung)

    def open(self, control: psutil.Process | None) -> None:
        """Accept callers. `control` is the process of Ray's control service, if it is on this machine."""
        self.lost = self.abandoned = self._closed = False
        self._hung = []
        self._control = control

    def carry_on(self) -> None:
        """Accept callers although the control service is dead, because workers still answer for a while."""
        self._control = None

    def close(self) -> None:
        """Accept no more callers, and wait until all callers inside have left."""
        with self._left:
            self._closed, self._control = True, None
            if not self._left.wait_for(lambda: not self._inside, LEAVING_SECONDS):
                log.debug("%d threads are still inside Ray", self._inside)

    def check(self) -> None:
        """Check that Ray may still be called. A thread that waits inside the context must call this every
        `LOOK_SECONDS`. Raises `ClusterLost` if Ray is being shut down, or its control service is dead."""
        if self._closed:
            raise ClusterLost("Ray was shut down, or is being shut down")
        self.look()

    def look(self) -> None:
        """Check that Ray still runs. A thread that waits outside the context must call this every `LOOK_SECONDS`.
        Raises `ClusterLost` if Ray's control service is dead."""
        control = self._control
        if control is None or time.monotonic() < self._next_look:
            return
        if is_alive(control):
            self._next_look = time.monotonic() + LOOK_SECONDS
        else:
            self.lost = True
            raise ClusterLost(
                f"Ray's control service (gcs_server, pid {control.pid}) ended: was it killed, or out of memory? "
                "Without it Ray ends every program on the cluster within a minute, so this program ends now"
            )

    def __enter__(self) -> None:
        with self._left:
            self._inside += 1
        try:
            self.check()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._left:
            self._inside -= 1
            if self._closed:
                self._left.notify_all()

    def end(self, what: str, call: Callable[[], object], seconds: float = ENDING_SECONDS) -> bool:
        """Make a call that stops processes or frees resources. Return False if the call did not return within
        `seconds`, or was not made because an earlier call is stuck.

        Args:
            what: words for the call in the log line `Ray did not {what} within ...`.
        """
        if self.stuck:
            return False
        errors: list[Exception] = []

        def run() -> None:
            try:
                call()
            except Exception as error:
                errors.append(error)

        # in a thread, because the main thread must run signal handlers, and native code that hangs would stop that
        thread = threading.Thread(target=run, name=f"ray-{what}", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._hung.append(thread)
            log.warning("Ray did not %s within %g s, so its processes are killed", what, seconds)
            return False
        if errors:
            raise errors[0]
        return True


ray_access = RayAccess()


def is_alive(process: psutil.Process) -> bool:
    """Return True if a process runs; False for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
