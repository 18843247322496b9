"""What a process of the reward pool runs: somebody's function, row by row, until the run closes its end of the line.

Light: nothing is imported here that the function may not need. Both ends speak in messages of `framed`; what the run
says is a `SetUp` and then `Rows`, what comes back is a `Ready` or an `Unstartable` and then `Answers`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import math
import mmap
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

from enginehouse.plugin.records import is_batched, keywords, resolve

MARK = "ENGINEHOUSE_REWARD_PROCESS"
"""Environment variable of a pool process, and so of all that a reward starts: what has it ends with the process."""

TIMEOUT = "ENGINEHOUSE_REWARD_TIMEOUT_SECONDS"
"""Environment variable of a pool process: the longest time for one row, of which a function's own limits are a part."""

CLOSE_SECONDS = 2.0
"""Longest time a process gets to end by itself."""

OUTPUT_BYTES = 4096
"""How much is kept of what a row printed, the last of it."""

TEXT_LENGTH = 10_000
"""How much of an error's message or traceback is kept, in characters."""

ANSWER_SECONDS = 0.002
"""So long a row's answer may wait for those of the next ones: a message costs more than a cheap row."""

FLOAT32_MAX = 3.4028234663852886e38

HEAD = struct.Struct("!Q")
AT_WORK = struct.Struct("!q")
"""In a file that both ends map: the number of the row that was begun last, whatever becomes of who is at it; -1 before
there is one."""

Style = Literal["single", "async", "batched"]


class SetUp(NamedTuple):
    """What a process is told first."""

    function: str
    arguments: Mapping[str, Any]
    python_path: Sequence[str]
    timeout_seconds: float
    concurrency: int
    may_abstain: bool = False


class Ready(NamedTuple):
    """The function is there, and is called in this way."""

    style: Style


class Unstartable(NamedTuple):
    """The function cannot be had in a pool process; why, with the traceback."""

    why: str


class Rows(NamedTuple):
    """Rows to score, with the numbers they are answered by."""

    numbers: Sequence[int]
    rows: Sequence[Mapping[str, Any]]


class Score(NamedTuple):
    """What a row got; as `enginehouse.engines.environment.Score`."""

    reward: float
    figures: Mapping[str, float]
    failure: str = ""
    answer: str = ""
    abstains: bool = False


class Failure(NamedTuple):
    """Why a row has no score, the traceback, and the end of what it printed.

    Plain text: an exception may not survive its way to another process. `late`: a row of an async function whose time
    was up; a thread that it waited for may run on.
    """

    what: str
    trace: str = ""
    output: str = ""
    late: bool = False


class Answers(NamedTuple):
    """Rows that are done, by their numbers; none says only that the process goes on."""

    results: Mapping[int, Score | Failure]


Inbox: TypeAlias = "queue.SimpleQueue[Rows | None]"
Answer: TypeAlias = Callable[[Mapping[int, Score | Failure]], None]


def framed(message: object) -> bytes:
    """A message as it is sent: its length and itself."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def end_marked(mark: str) -> None:
    """Kill every other process that a reward of the pool or process `mark` has started and that is still there."""
    import psutil

    for _ in range(10):  # what forks meanwhile is found the next time
        found = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark):
                    process.kill()
                    found = True
        if not found:
            return


def named_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def main(descriptor: int, at_work: int) -> None:
    """Serve the line on a file descriptor until it is closed, and say in the file of another what is at work."""
    faulthandler.enable()  # a crash in C says where, in the row's output
    line = socket.socket(fileno=descriptor)
    with line, line.makefile("rb") as incoming, suppress(BrokenPipeError, ConnectionResetError):
        setup: SetUp = _receive(incoming)
        inbox: Inbox = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(incoming, inbox), daemon=True).start()
        sys.path += [path for path in setup.python_path if path not in sys.path]  # last: see `functions.extend_path`
        try:
            judge = Judge(resolve(setup.function), setup)
        except BaseException as error:
            line.sendall(framed(Unstartable(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
            return
        line.sendall(framed(Ready(judge.style)))
        process, shared = os.getpid(), mmap.mmap(at_work, AT_WORK.size)

        def answer(results: Mapping[int, Score | Failure]) -> None:
            if os.getpid() != process:  # the function has forked, and its child came back from it
                os._exit(0)
            line.sendall(framed(Answers(results)))

        def begin(number: int) -> None:
            AT_WORK.pack_into(shared, 0, number)

        judge.serve(inbox, begin, answer)
    end_marked(os.environ[MARK])


def _receive(incoming: Any) -> Any:
    """The next message; None: the line was closed, or broke off in the midst of one."""
    head = incoming.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (length,) = HEAD.unpack(head)
    body = incoming.read(length)
    return pickle.loads(body) if len(body) == length else None


def _listen(incoming: Any, inbox: Inbox) -> None:
    """Take messages in while the function runs; end the process if it does not end soon after the line is closed."""
    with suppress(OSError, ValueError):
        while (message := _receive(incoming)) is not None:
            inbox.put(message)
    inbox.put(None)
    time.sleep(CLOSE_SECONDS)
    end_marked(os.environ[MARK])
    os._exit(1)


class Judge:
    """Calls the reward function, in the way that suits it, and makes of what happens a score or a failure.

    Attributes:
        style: `"async"` for an `async def`, `"batched"` for one marked by `batched_reward`, else `"single"`.
    """

    def __init__(self, function: Callable[..., Any], setup: SetUp):
        self._function, self._setup = function, setup
        self._taken = keywords(function)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - is its body async?
        )
        self.style: Style = "batched" if is_batched(function) else "async" if self._is_async else "single"
        self._output = _Output()

    def serve(self, inbox: Inbox, begin: Callable[[int], None], answer: Answer) -> None:
        """Score what comes, until None does; rows that are scored one after another are said to begin."""
        if self.style == "async":
            asyncio.run(self._serve_async(inbox, answer))
        elif self.style == "batched":
            with asyncio.Runner() as runner:
                runner.get_loop().set_default_executor(self._threads())
                for message in iter(inbox.get, None):
                    self._serve_batch(message, answer, runner)
        else:
            ended = _Ended(answer)
            for message in iter(inbox.get, None):
                for number, row in zip(message.numbers, message.rows, strict=True):
                    begin(number)
                    self._output.clear()
                    ended.add(number, self._one(row))
                ended.tell()

    def _one(self, row: Mapping[str, Any]) -> Score | Failure:
        try:
            return self._judged(self._function(**self._given(row), **self._setup.arguments))
        except BaseException as error:  # also a SystemExit or KeyboardInterrupt: they are the row's, not the run's
            return self._raised(error)

    async def _serve_async(self, inbox: Inbox, answer: Answer) -> None:
        running: set[asyncio.Task[None]] = set()

        async def one(number: int, row: Mapping[str, Any]) -> None:
            answer({number: await self._one_async(row)})

        loop, inboxes = asyncio.get_running_loop(), ThreadPoolExecutor(1)  # those of rows may all hang
        loop.set_default_executor(self._threads())
        while (message := await loop.run_in_executor(inboxes, inbox.get)) is not None:
            if not running:  # what rows print at once cannot be told apart
                self._output.clear()
            for number, row in zip(message.numbers, message.rows, strict=True):
                task = asyncio.create_task(one(number, row))
                running.add(task)
                task.add_done_callback(running.discard)

    def _threads(self) -> ThreadPoolExecutor:
        """What `asyncio.to_thread` takes: a thread for each row, and some for those that hang after their row."""
        return ThreadPoolExecutor(2 * self._setup.concurrency)

    async def _one_async(self, row: Mapping[str, Any]) -> Score | Failure:
        timeout = asyncio.timeout(self._setup.timeout_seconds)
        try:
            async with timeout:
                returned = await self._function(**self._given(row), **self._setup.arguments)
            return self._judged(returned)
        except BaseException as error:
            if timeout.expired():
                return Failure(overdue(self._setup.timeout_seconds), output=self._output.tail(), late=True)
            return self._raised(error)

    def _serve_batch(self, message: Rows, answer: Answer, runner: asyncio.Runner) -> None:
        """Score rows in one call; if it raises, each in a call of its own, so that one bad row costs only itself."""
        results = self._batch(message.rows, runner)
        if not isinstance(results, Failure):
            answer(dict(zip(message.numbers, results, strict=True)))
        elif len(message.rows) == 1:
            answer({message.numbers[0]: results})
        else:
            for number, row in zip(message.numbers, message.rows, strict=True):
                answer({})
                self._serve_batch(Rows([number], [row]), answer, runner)

    def _batch(self, rows: Sequence[Mapping[str, Any]], runner: asyncio.Runner) -> list[Score | Failure] | Failure:
        names = dict.fromkeys(name for row in rows for name in self._given(row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        self._output.clear()
        try:
            returned = self._function(**columns, **self._setup.arguments)
            values = list(runner.run(returned) if self._is_async else returned)
        except BaseException as error:
            return self._raised(error)
        if isinstance(returned, Mapping) or len(values) != len(rows):
            shown = shortened(returned) if isinstance(returned, Mapping) else f"{len(values)} values"
            said = f"returned {shown} for {len(rows)} rows; a batched reward returns a list, a value a row"
            return [Failure(said, output=self._output.tail())] * len(rows)
        return [self._judged(value) for value in values]

    def _given(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row if self._taken is None else {name: value for name, value in row.items() if name in self._taken}

    def _judged(self, returned: Any) -> Score | Failure:
        """What a function returned, as a score; where it is none, with what the function printed."""
        if returned is None and self._setup.may_abstain:
            return Score(0.0, {}, abstains=True)
        result = scored(returned)
        return result if isinstance(result, Score) else result._replace(output=self._output.tail())

    def _raised(self, error: BaseException) -> Failure:
        what = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        return Failure(f"raised {what[:TEXT_LENGTH]}", trace[-TEXT_LENGTH:], self._output.tail())


def scored(returned: Any) -> Score | Failure:
    """What a function returned, as a score.

    Anything `float` takes will do, except text; or a mapping of such with the key `reward`, in which `answer` is text.
    The reward has to be finite as float32, which is what it is trained with.
    """
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in named:
        has = ", ".join(map(repr, named)) or "none"
        return Failure(f"returned a mapping without the key 'reward', which is what is trained on; it has {has}")
    figures: dict[str, float] = {}
    answer = named.get("answer")
    if not isinstance(answer, str | None):
        kind = type(answer).__name__
        return Failure(f"returned {shortened(answer)} ({kind}) as 'answer', which is text: what the response answers")
    for name, value in named.items():
        if name == "answer":
            continue
        where = f" as {name!r}" if named is returned else ""
        try:
            number = None if isinstance(value, str | bytes | bytearray) else float(value)
        except Exception:
            number = None
        if number is None:
            return Failure(f"returned {shortened(value)} ({type(value).__name__}){where} instead of a number")
        if not math.isfinite(number):
            return Failure(f"returned {number}{where}, and a reward has to be a finite number")
        if name == "reward" and abs(number) > FLOAT32_MAX:
            return Failure(
                f"returned {number}{where}, beyond the largest float32, which is what rewards are trained with"
            )
        figures[str(name)] = number
    return Score(figures.pop("reward"), figures, answer=answer or "")


def overdue(seconds: float) -> str:
    """What is said of a row that took too long."""
    return f"did not return within {seconds:g} s (reward.timeout_seconds)"


def shortened(value: Any, limit: int = 200) -> str:
    """A value as it is shown in messages."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class _Ended:
    """Rows that are scored one after another: they are told together, `ANSWER_SECONDS` after the first of them."""

    def __init__(self, answer: Answer):
        self._answer, self._process = answer, os.getpid()
        self._results: dict[int, Score | Failure] = {}
        self._some, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._tell_in_time, daemon=True).start()

    def add(self, number: int, result: Score | Failure) -> None:
        if os.getpid() != self._process:  # a child, as in `main`; nobody there lets go of a lock that was held
            os._exit(0)
        with self._lock:
            self._results[number] = result
        self._some.set()

    def tell(self) -> None:
        with self._lock:
            results, self._results = self._results, {}
            self._some.clear()
            if results:
                self._answer(results)

    def _tell_in_time(self) -> None:
        with suppress(OSError):  # the run closed its end of the line
            while self._some.wait():
                time.sleep(ANSWER_SECONDS)
                self.tell()


class _Output:
    """What the process prints: its standard output and error are one file, emptied before each row."""

    def __init__(self) -> None:
        self._file = os.dup(1)  # kept, should the function close it

    def clear(self) -> None:
        with suppress(OSError):
            if os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)

    def tail(self) -> str:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        return tail(self._file)


def tail(file: int) -> str:
    """The end of what was printed to a file."""
    with suppress(OSError):
        size = os.fstat(file).st_size
        return os.pread(file, OUTPUT_BYTES, max(size - OUTPUT_BYTES, 0)).decode(errors="replace").strip()
    return ""
