"""Plays games in this process or in other processes.

In other processes, slow steps do not delay the run, and a crash ends only the games of one process. Steps that arrive
while a process is busy are sent to it together afterwards.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from enginehouse.errors import EnginehouseError

START_SECONDS = 300.0
"""Time limit for a process to import its games."""

GameCall = tuple[str, int, Any]
"""The action ("begin", "step" or "end"), the name of a game, and the argument of the action."""


class GameLost(EnginehouseError):
    """The process of a game has died."""


class HeldGame(Protocol):
    text: str

    def step(self, answer: str) -> Any: ...

    def end(self) -> None: ...


class Games:
    """Games by name; `make` begins a game with a seed."""

    def __init__(self, make: Callable[[int], HeldGame]):
        self._make = make
        self._games: dict[int, HeldGame] = {}

    def do(self, call: GameCall) -> Any:
        """Execute a call. Return the first text for `begin`, the game's result for `step`, and None for `end`."""
        action, name, argument = call
        if action == "begin":
            game = self._games[name] = self._make(argument)
            return game.text
        if action == "end":
            if name in self._games:
                self._games.pop(name).end()
            return None
        if name not in self._games:
            raise GameLost("the process that held the game is gone")
        return self._games[name].step(argument)


class InProcessGames:
    """Plays games in this process. Takes the arguments of `Games`."""

    def __init__(self, make: Callable[[int], HeldGame]):
        self._games = Games(make)

    async def begin(self, name: int, seed: int) -> str:
        """Begin a game; return its first text."""
        return self._games.do(("begin", name, seed))

    async def step(self, name: int, answer: str) -> Any:
        """Return the game's result for an answer."""
        return self._games.do(("step", name, answer))

    def end(self, name: int) -> None:
        self._games.do(("end", name, None))


class GameProcesses:
    """Plays games in other processes, which start with the first game. Has the methods of `InProcessGames`."""

    def __init__(self, make: Callable[[int], HeldGame], processes: int, step_seconds: float):
        self._processes = [_GameProcess(make, step_seconds) for _ in range(processes)]
        self._process_of: dict[int, _GameProcess] = {}

    async def begin(self, name: int, seed: int) -> str:
        """Begin a game in the process with the fewest games; return its first text."""
        process = self._process_of[name] = min(self._processes, key=lambda process: process.games)
        process.games += 1
        return await process.ask(("begin", name, seed))

    async def step(self, name: int, answer: str) -> Any:
        """Return the game's result for an answer.

        Raises:
            GameLost: the process died, or a step in it took too long.
        """
        return await self._process_of[name].ask(("step", name, answer))

    def end(self, name: int) -> None:
        if (process := self._process_of.pop(name, None)) is not None:
            process.games -= 1
            process.ask(("end", name, None)).add_done_callback(lambda future: future.cancelled() or future.exception())


class _GameProcess:
    """One process, which is replaced when it dies or hangs."""

    def __init__(self, make: Callable[[int], HeldGame], step_seconds: float):
        self.games = 0
        self._make, self._step_seconds = make, step_seconds
        self._executor: ProcessPoolExecutor | None = None
        self._started: set[BaseProcess] = set()
        self._waiting: list[tuple[GameCall, asyncio.Future[Any]]] = []
        self._working: asyncio.Task[None] | None = None

    def ask(self, call: GameCall) -> asyncio.Future[Any]:
        """Queue a call; return a future of its result."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, result))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return result

    async def _work(self) -> None:
        """Execute queued calls until there are none. However this ends, no future is left pending."""
        calls: list[tuple[GameCall, asyncio.Future[Any]]] = []
        try:
            while self._waiting:
                calls, self._waiting = self._waiting, []
                try:
                    results = await self._run([call for call, _ in calls])
                except Exception as error:
                    results = [error] * len(calls)
                for (_, future), result in zip(calls, results, strict=True):
                    if future.done() or future.get_loop().is_closed():  # nobody waits any more
                        continue
                    future.set_exception(result) if isinstance(result, BaseException) else future.set_result(result)
        finally:
            for _, future in [*calls, *self._waiting]:
                if not future.get_loop().is_closed():
                    future.cancel()

    async def _run(self, calls: Sequence[GameCall]) -> Sequence[Any]:
        try:
            if self._executor is None:
                if all(action == "end" for action, _, _ in calls):  # the games ended with their process
                    return [None] * len(calls)
                await self._start()
            work = asyncio.get_running_loop().run_in_executor(self._executor, _serve, calls)
            return await asyncio.wait_for(work, self._step_seconds * len(calls))
        except (BrokenProcessPool, TimeoutError) as error:
            self._stop()
            late = isinstance(error, TimeoutError)
            fate = f"took longer than step_seconds={self._step_seconds:g} for a step" if late else "died"
            raise GameLost(f"the process that held the game {fate}; its other games are lost too") from error
        except asyncio.CancelledError:  # the loop ends; without this, its end would wait for the step
            self._stop()
            raise

    async def _start(self) -> None:
        earlier = {*multiprocessing.active_children()}
        try:
            self._executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_up, (self._make,))
            ready = asyncio.get_running_loop().run_in_executor(self._executor, os.getpid)
            self._started = {*multiprocessing.active_children()} - earlier
            await asyncio.wait_for(ready, START_SECONDS)
        except TimeoutError as error:
            self._stop()
            raise GameLost(
                f"a process for games did not start within {START_SECONDS:g} s: does a module that the game imports "
                "wait for something in a new process?"
            ) from error
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            for process in self._started:
                process.kill()
            executor.shutdown(wait=False, cancel_futures=True)
        self._started = set()


# Runs in the process

_games: Games | None = None


def _set_up(make: Callable[[int], HeldGame]) -> None:
    global _games
    _games = Games(make)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _serve(calls: Sequence[GameCall]) -> list[Any]:
    """Execute calls. If a call raises an error of any kind, its result is the exception."""
    assert _games is not None
    results: list[Any] = []
    for call in calls:
        try:
            results.append(_games.do(call))
        except StopIteration as error:  # a future cannot contain this error
            results.append(RuntimeError(f"the game raised {error!r}"))
        except BaseException as error:
            results.append(error)
    return results
