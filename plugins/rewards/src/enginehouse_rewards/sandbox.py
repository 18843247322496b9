"""Runs an untrusted Python program in isolation, and deletes its files.

`sandboxed` runs inside the process and lists what a program cannot do. This module starts the process, enforces the
limits that the kernel does not enforce (time, output, disk), and ends it. A sandbox is no virtual machine: a program
could escape through a kernel bug in one of the system calls that it may still use.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from enginehouse.errors import EnginehouseError
from enginehouse_rewards import sandboxed
from enginehouse_rewards.program import MARK, kill_marked, name_exit

OUTPUT_BYTES = 2**20
"""A program that prints more than this is killed."""
FILE_BYTES, DISK_BYTES, FILES, OPEN_FILES = 2**24, 2**26, 256, 64
"""Limits: bytes of one file, bytes of all files, number of files, number of open files."""
MOST_THREADS = 256
"""Maximum number of threads of a program, which could otherwise use up the machine's limit of processes."""
LOOK_SECONDS = 0.05
"""Interval at which the directory and the threads are checked."""
START_SECONDS = 20.0
"""Time limit until the process is ready for a program."""
STALE_SECONDS = 300.0
"""Age at which an unlocked directory is deleted, because its owner was killed."""
PREFIX = "enginehouse-sandbox-"
_deleted_stale = -STALE_SECONDS

Isolation = Literal["required", "best"]


class SandboxError(EnginehouseError):
    """A program cannot be run with the requested isolation, or not at all."""


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a program: `how` is an exit code or a signal in words, or the limit that it exceeded."""

    how: str  # "exit code 0", "killed by SIGSEGV", "time", "output", "disk" or "threads"
    output: str = ""

    @property
    def well(self) -> bool:
        return self.how == "exit code 0"


class Sandbox:
    """A context manager with one process for a program. On exit it kills the process and deletes its files.

    Args:
        seconds: time limit for all calls together, and limit of CPU time.
        memory_mb: address space, in MiB.
        isolation: `"required"`: raises an error if the kernel lacks a restriction; `"best"`: runs the program without
            that restriction.
        given: standard input of the program.

    Attributes:
        missing: restrictions that this machine lacks: `sandboxed.FILES`, `sandboxed.SYSTEM_CALLS`.

    Raises:
        SandboxError: raised on entering the context, if a program cannot be run with this isolation.
    """

    def __init__(self, seconds: float, memory_mb: int = 1024, isolation: Isolation = "required", given: str = ""):
        self.missing: tuple[str, ...] = ()
        self._seconds, self._memory, self._isolation, self._given = seconds, memory_mb * 2**20, isolation, given
        self._output, self._replies = bytearray(), bytearray()
        self._verdict = ""

    def __enter__(self) -> Sandbox:
        _delete_stale()
        self.directory = tempfile.mkdtemp(prefix=PREFIX)
        self._lock = os.open(self.directory, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._mark = f"{os.environ.get(MARK, 'sandbox')}/{secrets.token_hex(8)}"
        self._until = time.monotonic() + START_SECONDS
        try:
            self._start()
            self._greet()
        except BaseException:
            self.close()
            raise
        self._until = time.monotonic() + self._seconds
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def run(self, program: str) -> ProgramEnd:
        """Run a program to its end. Call this only once."""
        self._send({"program": program, "tested": False})
        while not self._verdict:
            self._wait()
        return ProgramEnd(self._verdict, self._output.decode(errors="replace"))

    def load(self, program: str) -> bool:
        """Run a program, and keep the names that it defines for `evaluate` and `do`. Return True if it ran to its
        end."""
        self._send({"program": program, "tested": True})
        return self._receive() == {"ready": True}

    def evaluate(self, expression: str, expected: Any) -> bool:
        """True if an expression over the program's names equals `expected`, a value that a literal can express."""
        self._send({"evaluate": expression})
        try:
            return bool(ast.literal_eval(self._receive()["value"]) == expected)
        except Exception:  # the value is no literal, or a huge one
            return False

    def do(self, statement: str) -> bool:
        """True if a statement over the program's names runs to its end."""
        token = secrets.token_hex(16)
        self._send({"run": statement, "token": token})
        return self._receive() == {"done": token}

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()
            if sandboxed.SYSTEM_CALLS in self.missing:
                kill_marked(self._mark)  # the program may have started processes
            self._printed.close()
            self._selector.close()
        if hasattr(self, "_line"):
            self._line.close()
        _delete(Path(self.directory))
        os.close(self._lock)

    def _start(self) -> None:
        self._line, process_end = socket.socketpair()
        with process_end, tempfile.TemporaryFile() as input_file:
            input_file.write(self._given.encode(errors="surrogatepass"))
            input_file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", sandboxed.__file__, str(process_end.fileno())],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[process_end.fileno()],
                cwd=self.directory,
                env={MARK: self._mark, "MALLOC_ARENA_MAX": "1"},  # arenas of threads reserve much address space
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._printed = self._process.stdout
        self._selector = selectors.DefaultSelector()
        for end in (self._printed, self._line):
            os.set_blocking(end.fileno(), False)
            self._selector.register(end, selectors.EVENT_READ)

    def _greet(self) -> None:
        limits = {
            "RLIMIT_AS": self._memory,
            "RLIMIT_CPU": max(1, round(self._seconds + 1)),
            "RLIMIT_FSIZE": FILE_BYTES,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_CORE": 1,  # where cores go to a program, 0 is no limit
        }
        environment = {"HOME": self.directory, "TMPDIR": self.directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        self._send({"parent": os.getpid(), "limits": limits, "directory": self.directory, "environment": environment})
        reply = self._receive()
        if "missing" not in reply:
            raise SandboxError(f"a sandbox cannot be started: {reply.get('error') or self._verdict}")
        self.missing = tuple(reply["missing"])
        if self.missing and self._isolation == "required":
            raise SandboxError(refusal(self.missing))

    def _send(self, message: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data and not self._verdict:
            try:
                data = data[self._line.send(data) :]
            except BlockingIOError:
                self._wait()
            except OSError:  # the process closed its end, or is gone
                return

    def _receive(self) -> dict[str, Any]:
        """Return the next message; empty if none comes, or if there was more than one."""
        while b"\n" not in self._replies:
            if self._verdict:
                return {}
            self._wait()
        line, _, self._replies = self._replies.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) and not self._replies else {}

    def _wait(self) -> None:
        """Read output for up to `LOOK_SECONDS`, and kill the process if it exceeded a limit."""
        ready = self._selector.select(LOOK_SECONDS)
        for key, _ in ready:
            self._take_in(key.fileobj)
        if len(self._output) + len(self._replies) > OUTPUT_BYTES:
            self._end("output")
        elif time.monotonic() > self._until:
            self._end("time")
        elif self._uses_too_much():
            self._end("disk")
        elif self._has_too_many_threads():
            self._end("threads")
        elif not self._selector.get_map() or self._process.poll() is not None:
            try:
                self._process.wait(max(0.0, self._until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._end("time")
                return
            for key in list(self._selector.get_map().values()):  # its last output
                self._take_in(key.fileobj)
            code = self._process.returncode
            self._verdict = "time" if code == -signal.SIGXCPU else name_exit(code)

    def _take_in(self, end: Any) -> None:
        buffer = self._output if end is self._printed else self._replies
        with suppress(BlockingIOError, ConnectionError):
            while len(buffer) <= OUTPUT_BYTES:
                data = os.read(end.fileno(), 2**16)
                if not data:
                    self._selector.unregister(end)
                    return
                buffer += data

    def _uses_too_much(self) -> bool:
        number = used = 0
        with suppress(OSError), os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    number, used = number + 1, used + entry.stat(follow_symlinks=False).st_blocks * 512
                if number > FILES or used > DISK_BYTES:
                    return True
        return False

    def _has_too_many_threads(self) -> bool:
        try:
            return psutil.Process(self._process.pid).num_threads() > MOST_THREADS
        except psutil.Error:  # the process has ended
            return False

    def _end(self, limit: str) -> None:
        self._process.kill()
        self._process.wait()
        self._verdict = limit


def missing() -> tuple[str, ...]:
    """Return the restrictions that this machine lacks; none if it can run programs with isolation `"required"`."""
    with Sandbox(1.0, isolation="best") as sandbox:
        return sandbox.missing


def check_isolation() -> None:
    """Raise `SandboxError` if this machine cannot run programs with isolation `"required"`."""
    if names := missing():
        raise SandboxError(refusal(names))


def refusal(missing: Sequence[str]) -> str:
    return (
        f"this machine cannot restrict {' and '.join(missing)} of a program: that needs Linux 5.13 with Landlock among "
        "its security modules, and seccomp, on x86_64 or aarch64. The argument isolation=best accepts less isolation"
    )


def _delete_stale() -> None:
    """Delete, every `STALE_SECONDS`, the directories that no process has locked, because their owners were killed."""
    global _deleted_stale
    if time.monotonic() - _deleted_stale < STALE_SECONDS:
        return
    _deleted_stale = time.monotonic()
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):
            if directory.is_symlink() or time.time() - directory.stat().st_mtime < STALE_SECONDS:
                continue
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(directory)
            finally:
                os.close(descriptor)


def _delete(directory: Path) -> None:
    """Delete a directory, even if its program changed modes, without touching anything outside it."""

    def unlock(function: Any, path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        with suppress(OSError):
            if Path(path) != directory:
                os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path)

    shutil.rmtree(directory, onerror=unlock)
