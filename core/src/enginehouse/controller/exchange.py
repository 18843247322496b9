"""Sends many small requests to worker processes in few calls.

On the controller, `Exchange` collects all new requests of one turn of its event loop and sends them to a worker in one
call. On the worker, `AnswerQueue` returns from the call when a task has ended. The answer includes all tasks that end
shortly after. One call therefore delivers tasks and collects results, and a worker with a running task always has a
pending call.
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
"""Time in seconds that the result of an ended task waits for other tasks to end, so that one answer returns all."""


class Exchange(Generic[W]):
    """The controller's side of calls to several workers. All methods except `hurry` run on one event loop.

    Args:
        turn: function that sends new requests. It is called in the next turn of the loop after a call of `soon`, and
            after each call to a worker has ended.
        take: function that gets a worker and the result of a call to the worker.
        fail: function that gets a worker and the error of a call to the worker.
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
        """Call `turn` once, in the next turn of the loop."""
        if not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self.scheduled = False
        self._turn()

    def has_call(self, worker: W) -> bool:
        """Return True if a call to the worker was sent and its result has not been taken."""
        return worker in self._calls

    def send(self, worker: W, call: Callable[[], Future]) -> None:
        """Make a call to a worker, and pass its result to `take` or its error to `fail`."""
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
        """Tell all calls that the wait was interrupted. Callable from any thread."""
        for call in [call for calls in list(self._calls.values()) for call in list(calls)]:
            if not isinstance(call, Exception):
                call.hurry()


class AnswerQueue(Generic[T]):
    """The worker's side, on one event loop. A caller waits until a task has ended, and then gets all ended tasks. A new
    caller releases the previous caller, which may be dead, and gets the ended tasks instead."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[T]] = set()
        self._ended: list[asyncio.Task[T]] = []
        self._asking: asyncio.Future[None] | None = None  # of the newest caller
        self._due = False

    def ask(self) -> asyncio.Future[None]:
        """Release the previous caller, and return a token that identifies the new caller to `ended`."""
        self._release()
        self._asking = asyncio.get_running_loop().create_future()
        return self._asking

    def add(self, task: asyncio.Task[T]) -> None:
        """Add a running task. A caller gets the task once it has ended."""
        self._under_way.add(task)
        task.add_done_callback(self._note_end)

    def speak(self) -> None:
        """Release the waiting caller, or the next caller, after this turn of the loop."""
        self._due = True
        asyncio.get_running_loop().call_soon(self._speak)

    async def ended(self, asking: asyncio.Future[None], seconds: float | None = None) -> list[asyncio.Task[T]]:
        """Wait for at most `seconds`, and return the tasks that ended since the last answer. Returns an empty list if
        another caller has called `ask` since."""
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
        if self._due:  # else the caller was released since
            self._release()

    def _release(self) -> None:
        if self._asking is not None and not self._asking.done():
            self._asking.set_result(None)
