"""The program of a pool process. It calls the user's function row by row until the run closes the socket.

It imports only what every reward function needs. Both sides send messages made by `frame`. The run sends a `SetUp` and
then `RowsToScore`. The process sends a `Ready` or an `Unstartable`, and then `RowResults`.
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
"""Environment variable of a pool process and of everything that a reward starts, by which all are found and killed."""

TIMEOUT = "ENGINEHOUSE_REWARD_TIMEOUT_SECONDS"
"""Environment variable of a pool process: the time limit of a row, by which a function can set its own limits."""

CLOSE_SECONDS = 2.0
"""Time limit within which a process may end by itself. After that, it is killed."""

OUTPUT_BYTES = 4096
"""Maximum length of a row's printed output in reports; the last bytes are kept."""

TEXT_LENGTH = 10_000
"""Maximum number of characters of an error's message, and of its traceback."""

ANSWER_SECONDS = 0.002
"""Maximum time that a row's result waits for further results, because a message costs more than a cheap row."""

FLOAT32_MAX = 3.4028234663852886e38

HEAD = struct.Struct("!Q")
AT_WORK = struct.Struct("!q")
"""Layout of a file that both sides map into memory. It contains the number of the row that was begun last, even after
the process has died; -1 before the first row."""

Style = Literal["single", "async", "batched"]


class SetUp(NamedTuple):
    function: str
    arguments: Mapping[str, Any]
    python_path: Sequence[str]
    timeout_seconds: float
    concurrency: int
    may_abstain: bool = False


class Ready(NamedTuple):
    """The process has imported the function, and calls it in this style."""

    style: Style


class Unstartable(NamedTuple):
    """The function cannot be imported in a pool process; `why` contains the traceback."""

    why: str


class RowsToScore(NamedTuple):
    """Rows to score, with the numbers by which results name them."""

    numbers: Sequence[int]
    rows: Sequence[Mapping[str, Any]]


class RowScore(NamedTuple):
    """The score of a row, with the fields of `enginehouse.engines.environment.Score`."""

    reward: float
    figures: Mapping[str, float]
    failure: str = ""
    answer: str = ""
    abstains: bool = False


class Failure(NamedTuple):
    """The reason why a row has no score, the traceback, and the end of its printed output.

    All is plain text, because an exception may not survive pickling. `late` marks a row of an async function that timed
    out; a thread that it waited for may still run.
    """

    what: str
    trace: str = ""
    output: str = ""
    late: bool = False


class RowResults(NamedTuple):
    """Results by the numbers of their rows. An empty message only shows that the process still works."""

    results: Mapping[int, RowScore | Failure]


Inbox: TypeAlias = "queue.SimpleQueue[RowsToScore | None]"
Send: TypeAlias = Callable[[Mapping[int, RowScore | Failure]], None]


def frame(message: object) -> bytes:
    """Return the bytes of a message: its length, then its pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def kill_marked(mark: str) -> None:
    """Kill every other process that was started by the pool or process with this mark."""
    import psutil

    for _ in range(10):  # a process that forks meanwhile is killed in the next round
        killed = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get(MARK, "").startswith(mark):
                    process.kill()
                    killed = True
        if not killed:
            return


def name_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def main(descriptor: int, at_work: int) -> None:
    """Serve the socket `descriptor` until it is closed; write the number of the current row to the file `at_work`."""
    faulthandler.enable()  # a crash in C prints its place into the row's output
    line = socket.socket(fileno=descriptor)
    with line, line.makefile("rb") as incoming, suppress(BrokenPipeError, ConnectionResetError):
        setup: SetUp = _receive(incoming)
        inbox: Inbox = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(incoming, inbox), daemon=True).start()
        sys.path += [path for path in setup.python_path if path not in sys.path]  # last: see `functions.extend_path`
        try:
            judge = Judge(resolve(setup.function), setup)
        except BaseException as error:
            line.sendall(frame(Unstartable(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")))
            return
        line.sendall(frame(Ready(judge.style)))
        process, shared = os.getpid(), mmap.mmap(at_work, AT_WORK.size)

        def send(results: Mapping[int, RowScore | Failure]) -> None:
            if os.getpid() != process:  # the function has forked, and its child came back from it
                os._exit(0)
            line.sendall(frame(RowResults(results)))

        def begin(number: int) -> None:
            AT_WORK.pack_into(shared, 0, number)

        judge.serve(inbox, begin, send)
    kill_marked(os.environ[MARK])


def _receive(incoming: Any) -> Any:
    """Return the next message, or None if the socket was closed."""
    head = incoming.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (length,) = HEAD.unpack(head)
    body = incoming.read(length)
    return pickle.loads(body) if len(body) == length else None


def _listen(incoming: Any, inbox: Inbox) -> None:
    """Receive messages while the function runs. Exit if it still runs `CLOSE_SECONDS` after the socket closed."""
    with suppress(OSError, ValueError):
        while (message := _receive(incoming)) is not None:
            inbox.put(message)
    inbox.put(None)
    time.sleep(CLOSE_SECONDS)
    kill_marked(os.environ[MARK])
    os._exit(1)


class Judge:
    """Calls the reward function in its style, and turns the outcome into a score or a failure.

    `style` is `"async"` for an `async def`, `"batched"` for a function marked by `batched_reward`, else `"single"`.
    """

    def __init__(self, function: Callable[..., Any], setup: SetUp):
        self._function, self._setup = function, setup
        self._names = keywords(function)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - is its body async?
        )
        self.style: Style = "batched" if is_batched(function) else "async" if self._is_async else "single"
        self._output = _PrintedOutput()

    def serve(self, inbox: Inbox, begin: Callable[[int], None], send: Send) -> None:
        """Score the rows of the inbox until it yields None. `begin` is called for rows that are scored one by one."""
        if self.style == "async":
            asyncio.run(self._serve_async(inbox, send))
        elif self.style == "batched":
            with asyncio.Runner() as runner:
                runner.get_loop().set_default_executor(self._make_threads())
                for message in iter(inbox.get, None):
                    self._serve_batch(message, send, runner)
        else:
            results = _ResultBuffer(send)
            for message in iter(inbox.get, None):
                for number, row in zip(message.numbers, message.rows, strict=True):
                    begin(number)
                    self._output.clear()
                    results.add(number, self._score(row))
                results.flush()

    def _score(self, row: Mapping[str, Any]) -> RowScore | Failure:
        try:
            return self._judge(self._function(**self._select(row), **self._setup.arguments))
        except BaseException as error:  # also a SystemExit or KeyboardInterrupt: they are the row's, not the run's
            return self._describe(error)

    async def _serve_async(self, inbox: Inbox, send: Send) -> None:
        running: set[asyncio.Task[None]] = set()

        async def score(number: int, row: Mapping[str, Any]) -> None:
            send({number: await self._score_async(row)})

        loop, inboxes = asyncio.get_running_loop(), ThreadPoolExecutor(1)  # the threads of rows may all hang
        loop.set_default_executor(self._make_threads())
        while (message := await loop.run_in_executor(inboxes, inbox.get)) is not None:
            if not running:  # the output of concurrent rows cannot be told apart
                self._output.clear()
            for number, row in zip(message.numbers, message.rows, strict=True):
                task = asyncio.create_task(score(number, row))
                running.add(task)
                task.add_done_callback(running.discard)

    def _make_threads(self) -> ThreadPoolExecutor:
        """Return the executor of `asyncio.to_thread`. It has two threads for each concurrent row, because threads of
        late rows may still hang when the next rows begin."""
        return ThreadPoolExecutor(2 * self._setup.concurrency)

    async def _score_async(self, row: Mapping[str, Any]) -> RowScore | Failure:
        timeout = asyncio.timeout(self._setup.timeout_seconds)
        try:
            async with timeout:
                returned = await self._function(**self._select(row), **self._setup.arguments)
            return self._judge(returned)
        except BaseException as error:
            if timeout.expired():
                return Failure(overdue_text(self._setup.timeout_seconds), output=self._output.tail(), late=True)
            return self._describe(error)

    def _serve_batch(self, message: RowsToScore, send: Send, runner: asyncio.Runner) -> None:
        """Score rows in one call. If it raises an error, score each row separately, so a bad row affects no other."""
        results = self._score_batch(message.rows, runner)
        if not isinstance(results, Failure):
            send(dict(zip(message.numbers, results, strict=True)))
        elif len(message.rows) == 1:
            send({message.numbers[0]: results})
        else:
            for number, row in zip(message.numbers, message.rows, strict=True):
                send({})
                self._serve_batch(RowsToScore([number], [row]), send, runner)

    def _score_batch(
        self, rows: Sequence[Mapping[str, Any]], runner: asyncio.Runner
    ) -> list[RowScore | Failure] | Failure:
        names = dict.fromkeys(name for row in rows for name in self._select(row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        self._output.clear()
        try:
            returned = self._function(**columns, **self._setup.arguments)
            values = list(runner.run(returned) if self._is_async else returned)
        except BaseException as error:
            return self._describe(error)
        if isinstance(returned, Mapping) or len(values) != len(rows):
            shown = shorten(returned) if isinstance(returned, Mapping) else f"{len(values)} values"
            what = f"returned {shown} for {len(rows)} rows; a batched reward must return a list with one value per row"
            return [Failure(what, output=self._output.tail())] * len(rows)
        return [self._judge(value) for value in values]

    def _select(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of a row that the function takes."""
        return row if self._names is None else {name: value for name, value in row.items() if name in self._names}

    def _judge(self, returned: Any) -> RowScore | Failure:
        """Return the score in a returned value, or a failure with the function's output."""
        if returned is None and self._setup.may_abstain:
            return RowScore(0.0, {}, abstains=True)
        result = read_score(returned)
        return result if isinstance(result, RowScore) else result._replace(output=self._output.tail())

    def _describe(self, error: BaseException) -> Failure:
        what = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        return Failure(f"raised {what[:TEXT_LENGTH]}", trace[-TEXT_LENGTH:], self._output.tail())


def read_score(returned: Any) -> RowScore | Failure:
    """Read the score in a function's returned value.

    The value may be anything that `float` accepts, except text. It may also be a mapping of such values with the key
    `reward`, in which `answer` is text. The reward must be finite as float32, the type in which the run trains with it.
    """
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    if "reward" not in values:
        has = ", ".join(map(repr, values)) or "none"
        return Failure(f"returned a mapping that must have the key 'reward', but has {has}")
    figures: dict[str, float] = {}
    answer = values.get("answer")
    if not isinstance(answer, str | None):
        kind = type(answer).__name__
        return Failure(f"returned {shorten(answer)} ({kind}) as 'answer', which must be text")
    for name, value in values.items():
        if name == "answer":
            continue
        where = f" as {name!r}" if values is returned else ""
        try:
            number = None if isinstance(value, str | bytes | bytearray) else float(value)
        except Exception:
            number = None
        if number is None:
            return Failure(f"returned {shorten(value)} ({type(value).__name__}){where} instead of a number")
        if not math.isfinite(number):
            return Failure(f"returned {number}{where}, but a reward must be a finite number")
        if name == "reward" and abs(number) > FLOAT32_MAX:
            return Failure(f"returned {number}{where}, but a reward must not exceed the largest float32")
        figures[str(name)] = number
    return RowScore(figures.pop("reward"), figures, answer=answer or "")


def overdue_text(seconds: float) -> str:
    return f"did not return within {seconds:g} s (reward.timeout_seconds)"


def shorten(value: Any, limit: int = 200) -> str:
    """Return a value's `repr` for a message, cut off after `limit` characters."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class _ResultBuffer:
    """Collects results of rows that are scored one by one, and sends them `ANSWER_SECONDS` after the first."""

    def __init__(self, send: Send):
        self._send, self._process = send, os.getpid()
        self._results: dict[int, RowScore | Failure] = {}
        self._filled, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._flush_in_time, daemon=True).start()

    def add(self, number: int, result: RowScore | Failure) -> None:
        if os.getpid() != self._process:  # a forked child, as in `main`: there, no thread releases a held lock
            os._exit(0)
        with self._lock:
            self._results[number] = result
        self._filled.set()

    def flush(self) -> None:
        with self._lock:
            results, self._results = self._results, {}
            self._filled.clear()
            if results:
                self._send(results)

    def _flush_in_time(self) -> None:
        with suppress(OSError):  # the run closed its end of the socket
            while self._filled.wait():
                time.sleep(ANSWER_SECONDS)
                self.flush()


class _PrintedOutput:
    """The printed output of the process. Standard output and error are one file, which is emptied before each row."""

    def __init__(self) -> None:
        self._file = os.dup(1)  # stays open if the function closes its output

    def clear(self) -> None:
        with suppress(OSError):
            if os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)

    def tail(self) -> str:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        return read_tail(self._file)


def read_tail(file: int) -> str:
    with suppress(OSError):
        size = os.fstat(file).st_size
        return os.pread(file, OUTPUT_BYTES, max(size - OUTPUT_BYTES, 0)).decode(errors="replace").strip()
    return ""
