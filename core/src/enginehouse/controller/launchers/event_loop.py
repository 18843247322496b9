"""An event loop on its own thread, which runs a process's async methods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class EventLoop:
    """An event loop that starts at its first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> asyncio.AbstractEventLoop | None:
        """The loop; None until `submit` or `call` was used."""
        return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine and return a future for other threads."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on the loop from another thread, and wait for its result."""

        async def called() -> T:
            return function(*args)

        return self.submit(called()).result()

    def stop(self, timeout: float = 2.0) -> None:
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        async def cancel_all() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # the end of a task may start another
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        # no error log for a task that resists cancellation, because it ends with the process
        loop.call_soon_threadsafe(loop.set_exception_handler, lambda loop, context: log.debug("%s", context))
        with contextlib.suppress(concurrent.futures.TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(timeout)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(loop,), name="event loop", daemon=True)
                self._thread.start()
                self._loop = loop
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, even if a task or callback calls `sys.exit()`, which leaves `run_forever`."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            log.error("a task that nobody waits for raised %s; it has ended, and all others continue", repr(error))


@contextlib.contextmanager
def event_loop() -> Iterator[EventLoop]:
    """Make an event loop, and stop it when the context ends."""
    loop = EventLoop()
    try:
        yield loop
    finally:
        loop.stop()
