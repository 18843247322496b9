"""One side of the dispatch benchmark: a separate process, which is told over a pipe what to measure next.

This module has the code of both processes at the pipe, the benchmark and the side. Sides run in separate Python
environments, so it imports nothing of enginehouse. Functions of the benchmark import what only they need.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

GOODBYE_SECONDS = 30.0
"""Seconds that a side gets to stop its Ray."""
WAKING_CALLS = 3
"""First calls of a turn, which do not count: the side was paused, and Ray's processes catch up on what they missed."""


class Side(Protocol):
    """The object that runs a side's commands. Each command is a method with a JSON result."""

    def close(self) -> None:
        """End everything the side started."""
        ...


def serve(side: Side) -> None:
    """Run the commands on standard input, lines of `{"do": method, ...arguments}`, until it is closed.

    Answers go to standard output, one per line; everything else that is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer: dict[str, Any] = {"answer": getattr(side, command.pop("do"))(**command)}
            except Exception:
                answer = {"error": traceback.format_exc()}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        side.close()


@dataclass(frozen=True)
class Memory:
    """The growth of a process's memory while it was watched, in bytes.

    Attributes:
        own: resident memory that is not shared; Ray's object store does not count.
        resident: all resident memory, that of the object store included.
    """

    own: int
    resident: int


class SideProcess:
    """A side's process for the benchmark, which starts it and sends it one command at a time.

    Args:
        name: name of the side in messages.
        command: words of the command line.
        log: file that gets what the side prints.
        cwd: working directory of the side.
        env: environment variables of the side.

    Attributes:
        memory: growth of the side's own process in the last `ask` that watched it.
    """

    def __init__(self, name: str, command: Sequence[object], log: Path, *, cwd: Path, env: Mapping[str, str]):
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            # a separate session, because Ctrl-C is only for the benchmark, which then ends its sides in order
            self._process = subprocess.Popen(
                [str(word) for word in command], cwd=cwd, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        self._paused: list[Any] = []
        self._pending = b""
        self.memory: Memory | None = None

    def ask(self, do: str, *, timeout: float = 120.0, watch: float | None = None, **arguments: Any) -> Any:
        """Have the side run its method `do`, and return the result.

        Args:
            do: the method.
            timeout: maximum seconds.
            watch: seconds between two looks at the process's memory meanwhile; `memory` then holds the growth.
            arguments: arguments of the method.

        Raises:
            RuntimeError: the side failed, ended, or took too long; the message has the last lines that it printed.
        """
        assert self._process.stdin is not None
        self.resume()
        watched = _Watch(self._process.pid) if watch else None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(do, "it has ended") from error
        line = self._line(do, timeout, watch, watched)
        if watched:
            self.memory = watched.growth()
        answer = json.loads(line)
        if "error" in answer:
            raise self._failure(do, answer["error"])
        return answer["answer"]

    def _line(self, do: str, timeout: float, every: float | None, watched: _Watch | None) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._failure(do, f"no answer within {timeout:g} s")
                if watched:
                    watched.look()
                if not selector.select(min(left, every) if every else left):
                    continue
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise self._failure(do, "it ended without an answer")
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failure(self, do: str, what: str) -> RuntimeError:
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        return RuntimeError(f"{self.name}: {do}: {what}\n{last}\n(all of it: {self._log})")

    def pause(self) -> None:
        """Stop the side and its Ray until the next `ask`, because even a waiting worker is not quite idle."""
        if not self._paused:
            self._paused = self._family()
            _send(signal.SIGSTOP, self._paused)

    def resume(self) -> None:
        """Let paused processes continue."""
        _send(signal.SIGCONT, self._paused)
        self._paused = []

    def _family(self) -> list[Any]:
        """Return the side's process and all processes below it: Ray's processes and the workers."""
        import psutil

        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(self._process.pid)
            return [driver, *driver.children(recursive=True)]
        return []

    def close(self) -> None:
        """Let the side end its Ray and itself, and kill what is left of both. May be called again."""
        import psutil

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.resume()
        family = self._family()[1:]
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        _send(signal.SIGKILL, family)
        psutil.wait_procs(family, timeout=5.0)

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _send(number: int, processes: Sequence[Any]) -> None:
    """Send a signal to those processes that still exist."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


class _Watch:
    """Watches a process's memory from outside, so that copies made under the interpreter lock are seen too."""

    def __init__(self, pid: int):
        self._pid = pid
        self._before = own_and_resident(pid)
        self._most = self._before

    def look(self) -> None:
        own, resident = own_and_resident(self._pid)
        self._most = (max(self._most[0], own), max(self._most[1], resident))

    def growth(self) -> Memory:
        self.look()
        return Memory(self._most[0] - self._before[0], self._most[1] - self._before[1])


def own_and_resident(pid: int) -> tuple[int, int]:
    """Return two numbers of resident bytes of a process: bytes that it does not share with others, and all bytes."""
    import psutil

    memory = psutil.Process(pid).memory_info()
    return memory.rss - getattr(memory, "shared", 0), memory.rss
