"""Many small requests to worker processes in few calls.

The controller's end (`Exchange`) sends a worker, as one call, all that is new in one turn of its event loop. The
worker's end (`AnswerQueue`) ends the call once a task has ended, and returns the tasks that end just after it as well.
So one call both hands over and collects, and a worker with a running task always has a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from enginehouse.controller.future import Future

W = TypeVar("W")
T = TypeVar("T")

GATHERED_SECONDS = 0.01
"""Time that an ended task waits for tasks that end just after it, so that they go into one answer."""


class Exchange(Generic[W]):
    """The controller's end of some workers' calls. Everything but `hurry` runs on one event loop.

    Args:
        turn: sends new requests; called once in a turn of the loop after `soon` and after each call's end.
        take: takes the result of a worker's call.
        fail: takes the error of a worker's call, or of `take`.
    """

    def __init__(
        self,
        turn: Callable[[], object],
        take: Callable[[W, Any], Awaitable[None]],
        fail: Callable[[W, Exception], Awaitable[None]],
    ):
        self._turn, self._take, self._fail = turn, take, fail
        self._calls: dict[W, dict[Future | Exception, asyncio.Task[None]]] = {}
        self.scheduled = False

    def soon(self) -> None:
        """Have `turn` called in the next turn of the loop, once."""
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self.scheduled = False
        self._turn()

    def has_call(self, worker: W) -> bool:
        """True if a call of the worker was sent and has not been dealt with."""
        return worker in self._calls

    def send(self, worker: W, call: Callable[[], Future]) -> None:
        """Call a worker; `take` gets the result, or `fail` the error."""
        try:
            sent: Future | Exception = call()
        except Exception as error:
            sent = error
        collecting = asyncio.get_running_loop().create_task(self._collect(worker, sent))
        self._calls.setdefault(worker, {})[sent] = collecting

    async def _collect(self, worker: W, sent: Future | Exception) -> None:
        try:
            if isinstance(sent, Exception):
                raise sent
            await self._take(worker, await sent)
        except Exception as error:
            await self._fail(worker, error)
        del self._calls[worker][sent]
        if not self._calls[worker]:
            del self._calls[worker]
        self.soon()

    def hurry(self) -> None:
        """Tell the calls that the wait was interrupted. From any thread."""
        for call in [call for calls in list(self._calls.values()) for call in list(calls)]:
            if not isinstance(call, Exception):
                call.hurry()


class AnswerQueue(Generic[T]):
    """The worker's end, on one event loop: a caller waits until tasks have ended, if any are running.

    A new caller releases the caller before it, which may be dead, and gets all tasks that ended.
    """

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[T]] = set()
        self._ended: list[asyncio.Task[T]] = []
        self._asking: asyncio.Future[None] | None = None  # the newest
        self._due = False

    def ask(self) -> asyncio.Future[None]:
        """Release the caller before, and return a token that identifies this one to `ended`."""
        self._release()
        self._asking = asyncio.get_running_loop().create_future()
        return self._asking

    def add(self, task: asyncio.Task[T]) -> None:
        """Answer with a task once it has ended."""
        self._under_way.add(task)
        task.add_done_callback(self._note_end)

    def speak(self) -> None:
        """Answer the caller, or the next one, after this turn of the loop."""
        self._due = True
        asyncio.get_running_loop().call_soon(self._speak)

    async def ended(self, asking: asyncio.Future[None], seconds: float | None = None) -> list[asyncio.Task[T]]:
        """Wait, for at most `seconds`, and return the tasks that ended since the last answer.

        Returns none if another caller has asked since.
        """
        if self._under_way and not self._due:
            await asyncio.wait([asking], timeout=seconds)
        if self._asking is not asking:
            return []
        ended, self._ended, self._due = self._ended, [], False
        return ended

    def _note_end(self, task: asyncio.Task[T]) -> None:
        self._under_way.discard(task)
        self._ended.append(task)
        if not self._under_way:
            self.speak()
        elif len(self._ended) == 1:
            asyncio.get_running_loop().call_later(GATHERED_SECONDS, self._speak_of_ended)

    def _speak_of_ended(self) -> None:
        if self._ended:
            self.speak()

    def _speak(self) -> None:
        if self._due:  # else it was answered since
            self._release()

    def _release(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(None)
