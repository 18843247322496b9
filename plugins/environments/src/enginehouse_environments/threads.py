"""Functions that would hold up the event loop, each in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str) -> T:
    """What a function returns, or raises, in a thread that does not keep the process from ending.

    A thread cannot be ended: where nobody waits any more it runs on.

    Args:
        function: called there.
        name: the thread's.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[tuple[T] | BaseException] = loop.create_future()

    def settle(outcome: tuple[T] | BaseException) -> None:
        if not came.done():
            came.set_result(outcome)

    def run() -> None:
        outcome: tuple[T] | BaseException
        try:
            outcome = (function(),)
        except BaseException as error:
            outcome = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    outcome = await came
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]
