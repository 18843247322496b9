"""Runs blocking functions in threads, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Run a function in a thread with this name; return its result or raise its error.

    The thread does not keep the process from exiting. It cannot be stopped: after a cancellation, it continues to run.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T] | BaseException] = loop.create_future()

    def settle(outcome: tuple[T] | BaseException) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        outcome: tuple[T] | BaseException
        try:
            outcome = (function(),)
        except BaseException as error:
            outcome = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    outcome = await future
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]
