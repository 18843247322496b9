"""Games that are held in this process or in others, where what takes long holds up nobody, and a crash costs few.

A process is asked for all steps at once that have come while it was busy.
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
"""Longest time a process may take to import what it plays."""

Call = tuple[str, int, Any]
"""What is to be done, to which game, with what."""


class GameLost(EnginehouseError):
    """The process that held a game is gone."""


class Game(Protocol):
    """What is held."""

    text: str

    def step(self, answer: str) -> Any: ...

    def end(self) -> None: ...


class Games:
    """Games by name.

    Args:
        make: begins one, by a seed.
    """

    def __init__(self, make: Callable[[int], Game]):
        self._make = make
        self._games: dict[int, Game] = {}

    def do(self, call: Call) -> Any:
        """Do what is asked for: `begin` gives the first text, `step` what the game gives, `end` nothing."""
        what, name, given = call
        if what == "begin":
            game = self._games[name] = self._make(given)
            return game.text
        if what == "end":
            if (ended := self._games.pop(name, None)) is not None:
                ended.end()
            return None
        if name not in self._games:
            raise GameLost("the process that held the game is gone")
        return self._games[name].step(given)


class InPlace:
    """Plays games in this process; arguments as of `Games`."""

    def __init__(self, make: Callable[[int], Game]):
        self._games = Games(make)

    async def begin(self, name: int, seed: int) -> str:
        """Begin a game; its first text."""
        return self._games.do(("begin", name, seed))

    async def step(self, name: int, answer: str) -> Any:
        """What comes of an answer."""
        return self._games.do(("step", name, answer))

    def end(self, name: int) -> None:
        """Give a game up."""
        self._games.do(("end", name, None))


class GameProcesses:
    """Plays games in processes of their own, which are started at the first game; used as `InPlace`.

    Args:
        make: as of `Games`; goes to the processes.
        processes: how many.
        step_seconds: longest time for a step.
    """

    def __init__(self, make: Callable[[int], Game], processes: int, step_seconds: float):
        self._processes = [_Process(make, step_seconds) for _ in range(processes)]
        self._of: dict[int, _Process] = {}

    async def begin(self, name: int, seed: int) -> str:
        """See `InPlace`. In the process with the fewest games."""
        process = self._of[name] = min(self._processes, key=lambda one: one.games)
        process.games += 1
        return await process.ask(("begin", name, seed))

    async def step(self, name: int, answer: str) -> Any:
        """See `InPlace`.

        Raises:
            GameLost: the process died, or a step in it took too long.
        """
        return await self._of[name].ask(("step", name, answer))

    def end(self, name: int) -> None:
        """See `InPlace`."""
        if (process := self._of.pop(name, None)) is not None:
            process.games -= 1
            process.ask(("end", name, None)).add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class _Process:
    """One process, replaced when it dies or hangs.

    Attributes:
        games: how many it has.
    """

    def __init__(self, make: Callable[[int], Game], step_seconds: float):
        self.games = 0
        self._make, self._step_seconds = make, step_seconds
        self._executor: ProcessPoolExecutor | None = None
        self._started: set[BaseProcess] = set()
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._working: asyncio.Task[None] | None = None

    def ask(self, call: Call) -> asyncio.Future[Any]:
        """Have something done; what comes of it."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return done

    async def _work(self) -> None:
        """Do what is asked for, until nothing is. However this ends, nobody is left to wait."""
        asked: list[tuple[Call, asyncio.Future[Any]]] = []
        try:
            while self._waiting:
                asked, self._waiting = self._waiting, []
                try:
                    results = await self._done([call for call, _ in asked])
                except Exception as error:
                    results = [error] * len(asked)
                for (_, done), result in zip(asked, results, strict=True):
                    if done.done() or done.get_loop().is_closed():  # nobody waits any more
                        continue
                    done.set_exception(result) if isinstance(result, BaseException) else done.set_result(result)
        finally:
            for _, done in [*asked, *self._waiting]:
                if not done.get_loop().is_closed():
                    done.cancel()

    async def _done(self, calls: Sequence[Call]) -> Sequence[Any]:
        try:
            if self._executor is None:
                if all(what == "end" for what, _, _ in calls):  # they ended with their process
                    return [None] * len(calls)
                await self._start()
            work = asyncio.get_running_loop().run_in_executor(self._executor, _serve, calls)
            return await asyncio.wait_for(work, self._step_seconds * len(calls))
        except (BrokenProcessPool, TimeoutError) as error:
            self._stop()
            late = isinstance(error, TimeoutError)
            said = f"took longer than step_seconds={self._step_seconds:g} for a step" if late else "died"
            raise GameLost(f"the process that held the game {said}; its other games are lost too") from error
        except asyncio.CancelledError:  # the loop ends: this process would wait for a step at its end
            self._stop()
            raise

    async def _start(self) -> None:
        others = {*multiprocessing.active_children()}
        here = multiprocessing.get_context("spawn")
        try:
            self._executor = ProcessPoolExecutor(1, here, _set_up, (self._make,))
            ready = asyncio.get_running_loop().run_in_executor(self._executor, os.getpid)
            self._started = {*multiprocessing.active_children()} - others
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


# In a process of its own

_held: Games | None = None


def _set_up(make: Callable[[int], Game]) -> None:
    global _held
    _held = Games(make)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _serve(calls: Sequence[Call]) -> list[Any]:
    """Do all of them; an exception stands for what raised one, whatever a game raises."""
    assert _held is not None
    results: list[Any] = []
    for call in calls:
        try:
            results.append(_held.do(call))
        except StopIteration as error:  # no future takes one
            results.append(RuntimeError(f"the game raised {error!r}"))
        except BaseException as error:
            results.append(error)
    return results
