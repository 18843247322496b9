"""SGLang's own server as a process that a worker starts under its interpreter, watches and ends."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from enginehouse.errors import EnginehouseError

T = TypeVar("T")

GRACE_SECONDS = 10.0
"""Time that SGLang has to end by itself before it is killed."""
KEPT_LINES = 400
"""Lines of the server's log that are kept for the error that reports its death."""

KEYS = ("api_key", "admin_api_key")
"""Arguments that are not on the command line, because every user of the machine can read that."""
KEYS_VARIABLE = "ENGINEHOUSE_SGLANG_KEYS"
"""Environment variable that passes these arguments to `enginehouse_sglang.serve`, as a JSON list of words."""

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?([\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$")


class SGLangFailed(EnginehouseError):
    """The server has died, does not answer, or was never launched: this replica is lost and must be restarted."""


class ServerProcess:
    """SGLang's server in a child process, which ends with this process, however that ends.

    The server's output goes to this process's standard error. The future `died` is done once the server has ended.

    Args:
        arguments: Arguments of the server by SGLang's names without the dashes: `{"model_path": "..."}`.
        environment: Variables that the server gets in addition to this process's variables.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], where: str):
        self._where = where
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._not_started = ""
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = format_arguments({name: value for name, value in arguments.items() if name in KEYS})
        words = format_arguments({name: value for name, value in arguments.items() if name not in KEYS})
        command = [sys.executable, "-m", "enginehouse_sglang.serve", *words]
        safe = {"PYTHONSAFEPATH": "1"}  # else `-m` imports from the current directory first, here and in its children
        variables = {**os.environ, **environment, **safe, KEYS_VARIABLE: json.dumps(keys)}
        started = threading.Event()
        watched = command, variables, started
        threading.Thread(target=self._live, args=watched, name="enginehouse-sglang-life", daemon=True).start()
        started.wait()
        if self._not_started:
            raise SGLangFailed(f"{where}: sglang's server could not be started: {self._not_started}")

    def _live(self, command: Sequence[str], environment: Mapping[str, str], started: threading.Event) -> None:
        """Start the process and wait for its end, both on one thread, because Linux ends the process with the thread
        that started it."""
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getpid()

        def end_with_parent() -> None:
            libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:  # it ended just before
                os._exit(1)

        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals of the terminal go only to the run
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._not_started = str(error)
            return
        finally:
            started.set()
        threading.Thread(target=self._copy_log, name="enginehouse-sglang-log", daemon=True).start()
        self._process.wait()

        def report() -> None:
            if not self.died.done():
                self.died.set_result(None)

        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self.died.get_loop().call_soon_threadsafe(report)

    def _copy_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip())
                with contextlib.suppress(Exception):
                    sys.stderr.write(text)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True while the process runs."""
        return self._process.poll() is None

    async def wait_while_alive(self, call: Awaitable[T]) -> T:
        """Return the result of a call; raises `SGLangFailed` if the process ends first."""
        task = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {task, self.died}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SGLangFailed(self.describe_death())
            return task.result()
        finally:
            task.cancel()

    def describe_death(self) -> str:
        """Return a sentence on how the process ended, with the last error of its log."""
        code = self._process.poll()
        if code is None:
            return f"{self._where}: sglang's server does not answer"
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        words = self._find_last_error() or "it said nothing"
        return f"{self._where}: sglang's server (process {self.pid}) {ended}: {words}"

    def _find_last_error(self) -> str:
        """Return the last error in the log, or its last lines if there is none."""
        lines = list(self._lines)
        for line in reversed(lines):
            match = _ERROR.match(line.strip())
            # SGLang interrupts its processes when another process ends, which has logged its error before.
            if match and not match[1].startswith(("KeyboardInterrupt", "SystemExit")):
                return match[1][:1000]
        return " / ".join(line[:300] for line in lines[-5:] if line.strip())

    async def end(self) -> None:
        """End the process and all its children. May be called again."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def format_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments as words of SGLang's command line, without those that are None or False.

    A value that begins with a dash, as one key in 64 does, is written behind `=`. Otherwise it would be read as another
    argument.
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def find_free_port(host: str) -> int:
    """Return a port that is free on an address now."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.bind(address)
        return int(bound.getsockname()[1])
