"""A server that a worker starts, watches and ends: SGLang's own, under the worker's interpreter."""

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
"""How long SGLang may take to end by itself before it is killed."""
KEPT_LINES = 400
"""Lines of the server's log that are kept for the error that says it died."""

KEYS = ("api_key", "admin_api_key")
"""Arguments that no command line has: every user of the machine can read those."""
KEYS_VARIABLE = "ENGINEHOUSE_SGLANG_KEYS"
"""Environment variable that has them for `enginehouse_sglang.serve`, as a JSON list of words."""

_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?([\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$")


class SGLangFailed(EnginehouseError):
    """The server has died, does not answer, or was never launched: this replica is lost and must be started anew."""


class ServerProcess:
    """SGLang's server in a process beneath this one, which ends with it, however that ends.

    Its output goes on to this process's standard error.

    Args:
        arguments: of the server, by SGLang's names without the dashes: `{"model_path": "..."}`.
        environment: variables it gets beside those of this process.
        where: names this replica in messages.

    Attributes:
        died: done once the process has ended.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], where: str):
        self._where = where
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._ending = False
        self._not_started = ""
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        keys = {name: value for name, value in arguments.items() if name in KEYS}
        shown = {name: value for name, value in arguments.items() if name not in KEYS}
        command = [sys.executable, "-m", "enginehouse_sglang.serve", *as_words(shown)]
        started = threading.Event()
        safe = {"PYTHONSAFEPATH": "1"}  # else `-m` imports from the current directory first, here and beneath
        watched = command, {**os.environ, **environment, **safe, KEYS_VARIABLE: json.dumps(as_words(keys))}, started
        threading.Thread(target=self._live, args=watched, name="enginehouse-sglang-life", daemon=True).start()
        started.wait()
        if self._not_started:
            raise SGLangFailed(f"{where}: sglang's server could not be started: {self._not_started}")

    def _live(self, command: Sequence[str], environment: Mapping[str, str], started: threading.Event) -> None:
        """Start the process and wait for its end. Linux ends it with the thread that started it: this one."""
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
                start_new_session=True,  # a signal of the terminal is for the run
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._not_started = str(error)
            return
        finally:
            started.set()
        threading.Thread(target=self._read, name="enginehouse-sglang-log", daemon=True).start()
        self._process.wait()

        def say() -> None:
            if not self.died.done():
                self.died.set_result(None)

        with contextlib.suppress(RuntimeError):  # the event loop may be closed
            self.died.get_loop().call_soon_threadsafe(say)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip())
                with contextlib.suppress(Exception):
                    sys.stderr.write(text)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def lives(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    async def outlived(self, call: Awaitable[T]) -> T:
        """What a call gives, if the process does not end before.

        Raises:
            SGLangFailed: it does.
        """
        task = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {task, self.died}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise SGLangFailed(self.death())
            return task.result()
        finally:
            task.cancel()

    def death(self) -> str:
        """What is known of its end."""
        code = self._process.poll()
        if code is None:
            return f"{self._where}: sglang's server does not answer"
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{self._where}: sglang's server (process {self.pid}) {ended}: {self.last_words() or 'it said nothing'}"

    def last_words(self) -> str:
        """The last error in its log, else its last lines."""
        lines = list(self._lines)
        said = (_ERROR.match(line.strip()) for line in reversed(lines))
        # An interrupt is how SGLang's processes learn of the end of another, whose error was before.
        found = [match[1] for match in said if match and not match[1].startswith(("KeyboardInterrupt", "SystemExit"))]
        return found[0][:1000] if found else " / ".join(line[:300] for line in lines[-5:] if line.strip())

    async def end(self) -> None:
        """End it and all beneath it. May be called again."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self.lives():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def as_words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as SGLang's command line takes them; None and false are left out.

    A value that begins with a dash, as one key in 64 does, would be taken for another argument: it stands behind `=`.
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *(str(one) for one in value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def free_port(host: str) -> int:
    """A port that is free on an address now."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.bind(address)
        return int(taken.getsockname()[1])
