"""Runs a program that nobody has read, where it can reach nothing; what is left of it is deleted.

A program is Python, with the standard library. `sandboxed` is what runs there, and says what it cannot do; this end
starts it, keeps its limits that the kernel does not (time, output, room on the disk), and ends it. What a sandbox is
not: a virtual machine. A fault of the kernel's in what is left to a program is a way out of it.
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
from enginehouse_rewards.program import MARK, end_marked, named_exit

OUTPUT_BYTES = 2**20
"""A program that prints more than this is ended."""
FILE_BYTES, DISK_BYTES, FILES, OPEN_FILES = 2**24, 2**26, 256, 64
"""Most bytes of a file, bytes of all, files at a time, and open files."""
MOST_THREADS = 256
"""A program with more is ended: of small stacks its memory would hold as many as a machine has room for processes."""
LOOK_SECONDS = 0.05
"""How often its directory and its threads are looked at."""
START_SECONDS = 20.0
"""Longest time until it is about to run a program."""
STALE_SECONDS = 300.0
"""A directory that nobody holds is deleted when it is older than this: whoever made it was killed."""
PREFIX = "enginehouse-sandbox-"
_deleted_stale = -STALE_SECONDS

Isolation = Literal["required", "best"]


class SandboxError(EnginehouseError):
    """A program cannot be run as isolated as was asked for, or not at all."""


@dataclass(frozen=True)
class Ended:
    """What became of a program.

    Attributes:
        how: `"exit code 0"`, `"killed by SIGSEGV"`; or the limit that it was ended for: `"time"`, `"output"`, `"disk"`,
            `"threads"`.
        output: what it printed to its standard output.
    """

    how: str
    output: str = ""

    @property
    def well(self) -> bool:
        return self.how == "exit code 0"


class Sandbox:
    """One process, about to run a program. A context manager: at its end nothing is left of the process or its files.

    Args:
        seconds: longest time for all that is done with it; as long it may have a core.
        memory_mb: address space.
        isolation: with `"required"` it is refused where the kernel lacks something; with `"best"` it is done without.
        given: what the program reads from its standard input.

    Attributes:
        missing: what cannot be restricted here, of `sandboxed.FILES` and `sandboxed.SYSTEM_CALLS`.

    Raises:
        SandboxError: on entering.
    """

    def __init__(self, seconds: float, memory_mb: int = 1024, isolation: Isolation = "required", given: str = ""):
        self.missing: tuple[str, ...] = ()
        self._seconds, self._memory, self._isolation, self._given = seconds, memory_mb * 2**20, isolation, given
        self._output, self._said = bytearray(), bytearray()
        self._verdict = ""

    def __enter__(self) -> Sandbox:
        _delete_stale()
        self.directory = tempfile.mkdtemp(prefix=PREFIX)
        self._held = os.open(self.directory, os.O_RDONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)
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

    def run(self, program: str) -> Ended:
        """Run a program to its end; once only."""
        self._tell({"program": program, "tested": False})
        while not self._verdict:
            self._wait()
        return Ended(self._verdict, self._output.decode(errors="replace"))

    def load(self, program: str) -> bool:
        """Run a program that `evaluate` and `do` then use the names of; whether it came to its end."""
        self._tell({"program": program, "tested": True})
        return self._answer() == {"ready": True}

    def evaluate(self, expression: str, expected: Any) -> bool:
        """Whether an expression among the program's names has a value, of those that literals can say."""
        self._tell({"evaluate": expression})
        try:
            return bool(ast.literal_eval(self._answer()["value"]) == expected)
        except Exception:  # it is no literal, or a monstrous one
            return False

    def do(self, statement: str) -> bool:
        """Whether a statement among the program's names comes to its end."""
        token = secrets.token_hex(16)
        self._tell({"run": statement, "token": token})
        return self._answer() == {"done": token}

    def close(self) -> None:
        """End the process and delete its files."""
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()
            if sandboxed.SYSTEM_CALLS in self.missing:
                end_marked(self._mark)  # it may have started others
            self._printed.close()
            self._selector.close()
        if hasattr(self, "_line"):
            self._line.close()
        _delete(Path(self.directory))
        os.close(self._held)

    def _start(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as given:
            given.write(self._given.encode(errors="surrogatepass"))
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", sandboxed.__file__, str(theirs.fileno())],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=self.directory,
                env={MARK: self._mark, "MALLOC_ARENA_MAX": "1"},  # of address space threads would reserve much
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
        about = {"parent": os.getpid(), "limits": limits, "directory": self.directory, "environment": environment}
        self._tell(about)
        said = self._answer()
        if "missing" not in said:
            raise SandboxError(f"a sandbox cannot be started: {said.get('error') or self._verdict}")
        self.missing = tuple(said["missing"])
        if self.missing and self._isolation == "required":
            raise SandboxError(refusal(self.missing))

    def _tell(self, message: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data and not self._verdict:
            try:
                data = data[self._line.send(data) :]
            except BlockingIOError:
                self._wait()
            except OSError:  # it has closed its end, or is gone
                return

    def _answer(self) -> dict[str, Any]:
        """The next that it says; empty where it says nothing more, or what nobody asked for."""
        while b"\n" not in self._said:
            if self._verdict:
                return {}
            self._wait()
        said, _, self._said = self._said.partition(b"\n")
        try:
            message = json.loads(said)
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) and not self._said else {}

    def _wait(self) -> None:
        """Take in what comes within `LOOK_SECONDS`, and end the process if it is over a limit."""
        ready = self._selector.select(LOOK_SECONDS)
        for key, _ in ready:
            self._take_in(key.fileobj)
        if len(self._output) + len(self._said) > OUTPUT_BYTES:
            self._end("output")
        elif time.monotonic() > self._until:
            self._end("time")
        elif self._uses_too_much():
            self._end("disk")
        elif self._has_too_many_threads():
            self._end("threads")
        elif not self._selector.get_map() or self._process.poll() is not None:
            left = max(0.0, self._until - time.monotonic())
            try:
                self._process.wait(left)
            except subprocess.TimeoutExpired:
                self._end("time")
                return
            for key in list(self._selector.get_map().values()):  # what it said at last
                self._take_in(key.fileobj)
            code = self._process.returncode
            self._verdict = "time" if code == -signal.SIGXCPU else named_exit(code)

    def _take_in(self, end: Any) -> None:
        into = self._output if end is self._printed else self._said
        with suppress(BlockingIOError, ConnectionError):
            while len(into) <= OUTPUT_BYTES:
                data = os.read(end.fileno(), 2**16)
                if not data:
                    self._selector.unregister(end)
                    return
                into += data

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
        except psutil.Error:  # it has ended
            return False

    def _end(self, why: str) -> None:
        self._process.kill()
        self._process.wait()
        self._verdict = why


def missing() -> tuple[str, ...]:
    """What cannot be restricted on this machine: nothing, where programs can be run with isolation `"required"`."""
    with Sandbox(1.0, isolation="best") as sandbox:
        return sandbox.missing


def refusal(missing: Sequence[str]) -> str:
    """What is said where something cannot be restricted and has to be."""
    return (
        f"this machine cannot restrict {' and '.join(missing)} of a program, which takes Linux 5.13 with Landlock "
        "among its security modules, and seccomp, on x86_64 or aarch64; the argument isolation=best accepts less"
    )


def _delete_stale() -> None:
    """Delete now and then the directories of sandboxes whose owner was killed: nobody holds their lock."""
    global _deleted_stale
    if time.monotonic() - _deleted_stale < STALE_SECONDS:
        return
    _deleted_stale = time.monotonic()
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with suppress(OSError):
            if directory.is_symlink():
                continue
            if time.time() - directory.stat().st_mtime < STALE_SECONDS:
                continue
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(directory)
            finally:
                os.close(descriptor)


def _delete(directory: Path) -> None:
    """Delete a directory, also what a program that could change modes has locked; nothing outside it is touched."""

    def unlocked(function: Any, path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        with suppress(OSError):
            if Path(path) != directory:
                os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            function(path)

    shutil.rmtree(directory, onerror=unlocked)
